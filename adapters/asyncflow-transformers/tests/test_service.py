"""The rollout service: exact log-probs across updates, stop strings, failures."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from rollout_helpers import (
    LENGTH,
    VOCAB,
    make_buckets,
    make_requests,
    make_rollout,
    plain_logprobs,
    switch,
    tiny_qwen3,
    versioned_model,
)

from asyncflow_core.batch import Key
from asyncflow_core.errors import ConfigError, DataError, EngineError
from asyncflow_core.parts import PartContext, Tokenizer
from asyncflow_core.services.rollout import SwitchMode
from asyncflow_core.services.weight_sync import Bucket, TensorSpec, WeightSource
from asyncflow_core.testing.aio import collect, eventually, manifest_of, stream
from asyncflow_core.testing.generation import make_source
from asyncflow_transformers.weights import DoubleBuffer


@pytest.fixture
async def service(model_dir):
    async with make_rollout(model_dir) as opened:
        yield opened


async def started(service, requests, tokens=3):
    """The task that collects them, when all run."""
    before = (await service.stats()).tokens_generated
    task = asyncio.ensure_future(collect(service.generate(requests)))

    async def running():
        stats = await service.stats()
        done = stats.tokens_generated - before
        return stats.running == len(requests) and done >= tokens * len(requests)

    await eventually(running)
    return task


def assert_exact(model, completion, prompt=(3, 1, 2), *, start=0, temperature=1.0):
    expected = plain_logprobs(model, prompt, completion.response_ids, temperature)
    np.testing.assert_allclose(completion.behaviour_logprobs[start:], expected[start:], atol=1e-5)


@pytest.mark.parametrize("mode", list(SwitchMode))
@pytest.mark.parametrize("tied", [True, False])
async def test_logprobs_are_exact_before_and_after_each_kind_of_update(tmp_path, mode, tied):
    tiny_qwen3(tied=tied).save_pretrained(tmp_path / "m")
    async with make_rollout(tmp_path / "m") as service:
        for version in (0, 1, 2, 5):
            if version:
                await switch(service, tmp_path / "m", version, mode)
            completions = await collect(service.generate(make_requests(12, temperature=0.8)))
            model = versioned_model(tmp_path / "m", version)
            for completion in completions:
                assert completion.versions.tolist() == [[version, 8]]
                assert_exact(model, completion, temperature=0.8)


async def test_in_flight_tokens_carry_the_version_that_made_them(service, model_dir):
    task = await started(service, make_requests(4, max_new_tokens=300))
    await switch(service, model_dir, 1, SwitchMode.IN_FLIGHT)
    await switch(service, model_dir, 2, SwitchMode.IN_FLIGHT)
    for completion in await task:
        assert completion.versions[:, 0].tolist() == [0, 1, 2]
        counts = completion.versions[:, 1]
        assert counts.sum() == 300
        expected = plain_logprobs(
            versioned_model(model_dir, 0), (3, 1, 2), completion.response_ids[: counts[0]]
        )
        np.testing.assert_allclose(completion.behaviour_logprobs[: counts[0]], expected, atol=1e-5)


async def test_abort_resume_later_tokens_are_exactly_the_new_weights(service, model_dir):
    task = await started(service, make_requests(4, max_new_tokens=300))
    await switch(service, model_dir, 1, SwitchMode.ABORT_RESUME)
    for completion in await task:
        assert completion.versions[:, 0].tolist() == [0, 1]
        kept = completion.versions[0, 1]
        old = plain_logprobs(
            versioned_model(model_dir, 0), (3, 1, 2), completion.response_ids[:kept]
        )
        np.testing.assert_allclose(completion.behaviour_logprobs[:kept], old, atol=1e-5)
        assert_exact(versioned_model(model_dir, 1), completion, start=kept)
    stats = await service.stats()
    assert stats.tokens_kept >= 12
    assert stats.tokens_lost == 0


async def test_drain_holds_new_requests_until_running_ones_ended(service, model_dir):
    task = await started(service, make_requests(3, max_new_tokens=200))
    await service.stage_weights(make_source(make_buckets(versioned_model(model_dir, 1)), 1))
    commit = asyncio.ensure_future(service.commit_weights(1, SwitchMode.DRAIN))
    late = asyncio.ensure_future(collect(service.generate(make_requests(3, first=9))))
    await commit
    assert {tuple(v) for c in await task for v in c.versions.tolist()} == {(0, 200)}
    for completion in await late:
        assert completion.versions[:, 0].tolist() == [1]
        assert_exact(versioned_model(model_dir, 1), completion)


async def test_a_cancelled_drain_never_happens(service, model_dir):
    task = await started(service, make_requests(2, max_new_tokens=400))
    await service.stage_weights(make_source(make_buckets(versioned_model(model_dir, 1)), 1))
    commit = asyncio.ensure_future(service.commit_weights(1, SwitchMode.DRAIN))
    await asyncio.sleep(0)
    commit.cancel()
    await asyncio.gather(commit, return_exceptions=True)
    await switch(service, model_dir, 2, SwitchMode.IN_FLIGHT)
    for completion in await task:
        assert completion.versions[:, 0].tolist() == [0, 2]
    assert (await service.stats()).version == 2


async def test_a_cancelled_drain_lets_waiting_requests_start(service, model_dir):
    task = await started(service, make_requests(2, max_new_tokens=600))
    await service.stage_weights(make_source(make_buckets(versioned_model(model_dir, 1)), 1))
    commit = asyncio.ensure_future(service.commit_weights(1, SwitchMode.DRAIN))
    await asyncio.sleep(0)
    commit.cancel()
    await asyncio.gather(commit, return_exceptions=True)
    quick = await collect(service.generate(make_requests(2, first=5, max_new_tokens=2)))
    assert [c.versions.tolist() for c in quick] == [[[0, 2]]] * 2
    assert not task.done()
    await service.commit_weights(1, SwitchMode.IN_FLIGHT)
    assert [c.versions[:, 0].tolist() for c in await task] == [[0, 1]] * 2


@pytest.mark.parametrize("fault", ["unknown", "missing", "dtype", "twice", "tied", "announced"])
async def test_bad_weights_are_refused_and_the_old_version_serves(service, model_dir, fault):
    first, *rest = make_buckets(versioned_model(model_dir, 1))
    spec, *others = first.specs
    manifest = None
    changed = {
        "unknown": [replace(spec, name="no.such", aliases=()), *others],
        "missing": others,
        "dtype": [replace(spec, dtype="I32"), *others],
        "twice": [spec, *others],
        "tied": [spec, replace(spec, name="lm_head.weight"), *others],
        "announced": others,
    }[fault]
    buckets = [Bucket(tuple(changed), first.data), *rest]
    if fault == "twice":
        manifest, buckets = manifest_of(buckets, 1), [buckets[0], buckets[0], *rest]
    if fault == "announced":
        manifest = manifest_of([first, *rest], 1)
    source = WeightSource(manifest or manifest_of(buckets, 1), buckets=stream(buckets))
    with pytest.raises(DataError, match=r"tensor|bucket"):
        await service.stage_weights(source)
    for completion in await collect(service.generate(make_requests(2))):
        assert completion.versions.tolist() == [[0, 8]]
        assert_exact(versioned_model(model_dir, 0), completion)
    await switch(service, model_dir, 1, SwitchMode.DRAIN)
    (completion,) = await collect(service.generate(make_requests(1)))
    assert_exact(versioned_model(model_dir, 1), completion)


async def test_a_flipped_bit_changes_the_checksum(service, model_dir):
    buckets = make_buckets(versioned_model(model_dir, 1))
    source = make_source(buckets, 1)
    assert (await service.stage_weights(source)).checksum == source.manifest.checksum
    source = make_source(buckets, 1)
    buckets[1].data[7] ^= 16
    staged = await service.stage_weights(source)
    assert staged.checksum != source.manifest.checksum
    assert staged.nbytes == source.manifest.nbytes


async def test_read_only_buckets_are_taken(service, model_dir):
    buckets = make_buckets(versioned_model(model_dir, 1))
    for bucket in buckets:
        bucket.data.flags.writeable = False
    await service.stage_weights(make_source(buckets, 1))
    await service.commit_weights(1, SwitchMode.IN_FLIGHT)
    (completion,) = await collect(service.generate(make_requests(1)))
    assert_exact(versioned_model(model_dir, 1), completion)


async def test_files_are_taken_in_and_damage_to_them_is_seen(service, model_dir, tmp_path):
    model = versioned_model(model_dir, 1)
    model.save_pretrained(tmp_path)
    manifest = manifest_of(make_buckets(model), 1)
    source = WeightSource(manifest, path=str(tmp_path))
    assert (await service.stage_weights(source)).checksum == manifest.checksum
    await service.commit_weights(1, SwitchMode.IN_FLIGHT)
    (completion,) = await collect(service.generate(make_requests(1)))
    assert_exact(model, completion)
    file = tmp_path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)
    assert (await service.stage_weights(source)).checksum != manifest.checksum
    file.unlink()
    with pytest.raises(DataError, match="retired"):
        await service.stage_weights(source)


async def test_broadcast_nobody_can_join_is_an_error_by_its_deadline(service, model_dir):
    manifest = manifest_of(make_buckets(versioned_model(model_dir, 1)), 1)
    how = {
        "backend": "gloo",
        "host": "127.0.0.1",
        "port": 1,
        "group": "g",
        "rank": 1,
        "world_size": 2,
        "timeout_s": 0.2,
        "buckets": [[4, [[0, 0]]]],
    }
    with pytest.raises(EngineError, match="cannot take weights in"):
        await service.stage_weights(WeightSource(manifest, collective=how))
    with pytest.raises(DataError, match="join"):
        await service.stage_weights(WeightSource(manifest, collective={"backend": "gloo"}))


async def test_weights_read_back_are_those_that_serve(service, model_dir):
    for version in (0, 1):
        if version:
            await switch(service, model_dir, version, SwitchMode.DRAIN)
        for bucket in make_buckets(versioned_model(model_dir, version)):
            served = await collect(service.read_weights(bucket.specs))
            for spec, found in zip(bucket.specs, served, strict=True):
                assert found.specs == (replace(spec, offset=0),)
                np.testing.assert_array_equal(found.data, bucket.tensor_bytes(spec))
    with pytest.raises(DataError, match=r"no\.such"):
        await collect(service.read_weights([TensorSpec("no.such", "F32", (1,))]))


async def test_staging_goes_on_while_generating(service, model_dir):
    task = await started(service, make_requests(2, max_new_tokens=600))
    buckets = make_buckets(versioned_model(model_dir, 1), per_bucket=1)
    seen = []

    async def slow():
        for bucket in buckets:
            seen.append((await service.stats()).tokens_generated)
            yield bucket
            if len(seen) < 4:
                last = seen[-1]
                await eventually(lambda last=last: service._loop.stats.tokens_generated > last)

    await service.stage_weights(WeightSource(manifest_of(buckets, 1), buckets=slow()))
    assert seen[0] < seen[1] < seen[2] < seen[3]
    assert {v for c in await task for v in c.versions[:, 0].tolist()} == {0}


async def test_many_overlapping_calls_each_get_their_own(service):
    calls = [
        collect(service.generate(make_requests(7, first=10 * n, max_new_tokens=1 + n)))
        for n in range(12)
    ]
    for n, completions in enumerate(await asyncio.gather(*calls)):
        assert sorted(c.key.sample for c in completions) == list(range(10 * n, 10 * n + 7))
        assert {len(c.response_ids) for c in completions} == {1 + n}
    stats = await service.stats()
    assert stats.tokens_generated == 7 * sum(range(1, 13))
    assert stats.busy_s > 0


async def test_a_row_may_run_twice_at_once(service):
    calls = [collect(service.generate(make_requests(3))) for _ in range(2)]
    first, second = (sorted(c, key=lambda c: c.key) for c in await asyncio.gather(*calls))
    for a, b in zip(first, second, strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()


async def test_cancel_mid_generate_counts_lost_tokens_and_leaves_it_usable(service):
    keep = await started(service, make_requests(1, max_new_tokens=300), tokens=1)
    gone = await started_more(service, make_requests(3, first=5, max_new_tokens=600), 4)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)

    async def alone():
        return (await service.stats()).running <= 1

    await eventually(alone)
    assert (await service.stats()).tokens_lost > 0
    assert [len(c.response_ids) for c in await keep] == [300]
    assert len(await collect(service.generate(make_requests(5)))) == 5


async def started_more(service, requests, running):
    task = asyncio.ensure_future(collect(service.generate(requests)))

    async def there():
        return (await service.stats()).running == running

    await eventually(there)
    return task


async def test_abort_reaches_waiting_requests_too(model_dir):
    async with make_rollout(model_dir, slots=2) as service:
        requests = make_requests(5, max_new_tokens=600)
        task = asyncio.ensure_future(collect(service.generate(requests)))

        async def running():
            return (await service.stats()).tokens_generated > 4

        await eventually(running)
        assert await service.abort([Key(0, 0, 0, 4)]) == 1
        assert await service.abort() == 4
        lengths = {c.key.sample: len(c.response_ids) for c in await task}
        assert sorted(lengths) == [0, 1, 2, 3, 4]
        assert lengths[4] == 0
        assert await service.abort() == 0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prompt": ()}, "empty"),
        ({"prompt": (VOCAB,)}, str(VOCAB)),
        ({"max_new_tokens": LENGTH}, "max_length"),
        ({"temperature": -1.0}, "temperature"),
        ({"stop": ("x",)}, "tokenizer"),
    ],
)
async def test_invalid_requests_are_refused_by_key_before_anything_starts(service, change, match):
    requests = [*make_requests(2), *make_requests(1, first=7, **change)]
    with pytest.raises(DataError, match=match) as caught:
        await collect(service.generate(requests))
    assert "0/0/0/7" in str(caught.value)
    assert (await service.stats()).tokens_generated == 0


class Letters(Tokenizer):
    """Token 0 is "A", and so on."""

    eos_token_ids = (1,)
    vocab_size = VOCAB

    def encode(self, text):
        return [ord(letter) - 65 for letter in text]

    def decode(self, ids):
        return "".join(chr(65 + int(token)) for token in ids)


async def test_stop_strings_end_a_response_and_stay_in_it(model_dir):
    letters = Letters()
    context = PartContext(name="rollout", tokenizer=letters)
    async with make_rollout(model_dir, context=context) as service:
        requests = make_requests(30, max_new_tokens=60)
        whole = {c.key: c for c in await collect(service.generate(requests))}
        text = letters.decode(whole[requests[0].key].response_ids)
        stop = (text[4:6], "never there")
        found = await collect(service.generate(make_requests(30, max_new_tokens=60, stop=stop)))
        stopped = 0
        for completion in found:
            free = whole[completion.key]
            text = letters.decode(free.response_ids)
            end = text.find(stop[0])
            expected = text if end < 0 else text[: end + 2]
            stopped += end >= 0
            assert letters.decode(completion.response_ids) == expected
            reason = free.finish_reason if end < 0 else "stop"
            assert completion.finish_reason == reason
            np.testing.assert_allclose(
                completion.behaviour_logprobs,
                free.behaviour_logprobs[: len(expected)],
                atol=1e-5,
            )
        assert stopped >= 1


async def test_ending_tokens_of_the_runs_tokenizer_end_responses(model_dir):
    context = PartContext(name="rollout", tokenizer=Letters())
    async with make_rollout(model_dir, context=context) as service:
        completions = await collect(service.generate(make_requests(30, max_new_tokens=300)))
    ended = [c for c in completions if c.finish_reason == "stop"]
    assert ended
    assert all(c.response_ids[-1] == 1 for c in ended)


async def test_an_engine_failure_fails_waiting_and_later_calls(service, model_dir):
    tasks = [
        await started(service, make_requests(1, max_new_tokens=600)),
        asyncio.ensure_future(collect(service.generate(make_requests(20, first=3)))),
    ]
    model = versioned_model(model_dir, 1)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    await service.stage_weights(make_source(make_buckets(model), 1))
    await service.commit_weights(1, SwitchMode.IN_FLIGHT)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], EngineError)
    assert "not finite" in str(results[0])
    for call in (
        collect(service.generate(make_requests(1))),
        service.abort(),
        service.commit_weights(1, SwitchMode.DRAIN),
    ):
        with pytest.raises(Exception, match=r"not finite|staged") as caught:
            await call
        assert isinstance(caught.value, EngineError) or "staged" in str(caught.value)


async def test_a_model_it_cannot_serve_is_refused_at_open(model_dir, tmp_path):
    service = make_rollout(model_dir, max_length=LENGTH + 1)
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        await service.open()
    await service.aclose()
    missing = make_rollout(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="nowhere"):
        await missing.open()
    await missing.aclose()


async def test_a_tensor_with_an_alias_name_of_ours_is_taken(service, model_dir):
    model = versioned_model(model_dir, 1)
    first, *rest = make_buckets(model)
    spec, *others = first.specs
    renamed = TensorSpec("lm_head.weight", spec.dtype, spec.shape, 0, (spec.name,))
    buckets = [Bucket((renamed, *others), first.data), *rest]
    source = make_source(buckets, 1)
    assert (await service.stage_weights(source)).checksum == source.manifest.checksum
    await service.commit_weights(1, SwitchMode.IN_FLIGHT)
    (completion,) = await collect(service.generate(make_requests(1)))
    assert_exact(model, completion)


async def test_stage_that_fails_has_let_its_source_go(service, model_dir):
    buckets, closed = make_buckets(versioned_model(model_dir, 1)), []

    async def source():
        try:
            for bucket in [buckets[0], buckets[0]]:
                yield bucket
        finally:
            closed.append(True)

    given = source()
    with pytest.raises(DataError):
        await service.stage_weights(WeightSource(manifest_of(buckets, 1), buckets=given))
    assert closed == [True]


def test_transposed_parameter_takes_in_two_versions_bit_for_bit():
    model = torch.nn.Linear(3, 2, bias=False)
    model.weight = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2).T)
    before = model.weight.detach().clone()
    buffer = DoubleBuffer(model)
    assert torch.equal(model.weight, before)
    for version in (1, 2):
        data = np.full((2, 3), version, np.float32) + np.arange(6, dtype=np.float32).reshape(2, 3)
        spec = TensorSpec("weight", "F32", (2, 3))
        bucket = Bucket((spec,), data.reshape(-1).view(np.uint8))
        buffer.begin([spec])
        buffer.add(bucket)
        assert buffer.finish()[0] == manifest_of([bucket], version).checksum
        buffer.swap()
        np.testing.assert_array_equal(model.weight.detach().numpy(), data)
