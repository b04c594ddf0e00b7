"""A real SGLang server: log-probs, updates, partial responses, pauses, refusals."""

import asyncio
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from sglang_helpers import (
    PROMPT,
    VOCAB,
    assert_exact,
    make_buckets,
    make_requests,
    make_rollout,
    save_model,
    switch,
    versioned_model,
)

from asyncflow_core.errors import DataError, EngineError
from asyncflow_core.services.rollout import SwitchMode
from asyncflow_core.services.weight_sync import WeightSource
from asyncflow_core.testing.aio import collect, eventually, manifest_of
from asyncflow_core.testing.generation import make_source
from asyncflow_sglang.health import State
from asyncflow_sglang.http import UnreachableError
from asyncflow_sglang.push import Pusher

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]

PATIENT = 120.0


@pytest.fixture
async def service(model, server):
    async with make_rollout(model, addresses=(server.url,), stream_interval=2) as opened:
        yield opened


async def started(service, requests, tokens=3):
    """The task that collects them, when all run."""
    before = (await service.stats()).tokens_generated
    task = asyncio.ensure_future(collect(service.generate(requests)))

    async def running():
        stats = await service.stats()
        done = stats.tokens_generated - before
        return stats.running == len(requests) and done >= tokens * len(requests)

    await eventually(running, timeout_s=PATIENT)
    return task


def only(service):
    (found,) = service._servers.values()
    return found


@pytest.mark.parametrize("update", ["disk", "tensor", "distributed"])
async def test_logprobs_equal_transformers_before_and_after_each_kind_of_update(
    model, server, update
):
    options = {"update": update, "bucket_bytes": 30_000}
    async with make_rollout(model, addresses=(server.url,), **options) as service:
        for version, mode in enumerate([None, *SwitchMode]):
            if version:
                await switch(service, model, version, mode)
            asked = make_requests(6, temperature=0.7) + make_requests(2, first=6, temperature=0.0)
            completions = await collect(service.generate(asked))
            reference = versioned_model(model, version)
            for completion in completions:
                assert completion.versions.tolist() == [[version, 8]]
                greedy = completion.key.sample >= 6
                assert_exact(reference, completion, temperature=1.0 if greedy else 0.7)
                if greedy:
                    ids = plain_greedy(reference, 8)
                    assert completion.response_ids.tolist() == ids


def plain_greedy(reference, tokens):
    ids = [*PROMPT]
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(reference(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


async def test_truncated_draws_stay_in_their_set_with_logprobs_of_the_whole(service, model):
    reference = versioned_model(model, 0)
    for sampling in ({"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}):
        for completion in await collect(service.generate(make_requests(4, **sampling))):
            assert_exact(reference, completion)
    greedy = plain_greedy(reference, 8)
    for completion in await collect(service.generate(make_requests(2, top_k=1))):
        assert completion.response_ids.tolist() == greedy
        assert_exact(reference, completion)


async def test_stops_by_id_and_by_string_are_kept(service, model):
    greedy = plain_greedy(versioned_model(model, 0), 8)
    third = greedy[2]
    first = greedy.index(third) + 1
    for stop in ({"stop_token_ids": (third,)}, {"stop": (f"t{third}",)}):
        (completion,) = await collect(service.generate(make_requests(1, temperature=0.0, **stop)))
        assert completion.finish_reason == "stop"
        assert len(completion.response_ids) <= first
        if "stop_token_ids" in stop:
            assert completion.response_ids.tolist() == greedy[:first]


async def test_two_hundred_ragged_requests_each_end_once_exactly(service, model):
    rng = np.random.default_rng(0)
    requests = [
        replace(
            request,
            prompt_ids=rng.integers(0, VOCAB, rng.integers(1, 40)).astype(np.int32),
            sampling=replace(request.sampling, max_new_tokens=int(rng.integers(1, 30))),
        )
        for request in make_requests(200)
    ]
    by_key = {request.key: request for request in requests}
    reference = versioned_model(model, 0)
    for completion in await collect(service.generate(requests)):
        request = by_key.pop(completion.key)
        assert len(completion.response_ids) == request.sampling.max_new_tokens
        assert_exact(reference, completion, request.prompt_ids.tolist())
    assert not by_key


@pytest.mark.parametrize("how", ["in_place", "retract"])
async def test_in_flight_tokens_carry_the_version_that_made_them(model, server, how):
    server.slow_down(0.02)
    async with make_rollout(model, addresses=(server.url,), in_flight=how) as service:
        task = await started(service, make_requests(3, max_new_tokens=120))
        await switch(service, model, 1, SwitchMode.IN_FLIGHT)
        later = await collect(service.generate(make_requests(2, first=5)))
        old, new = versioned_model(model, 0), versioned_model(model, 1)
        for completion in await task:
            (v0, n0), (v1, n1) = completion.versions.tolist()
            assert (v0, v1, n0 + n1) == (0, 1, 120)
            assert_exact(old, completion, stop=n0)
            if how == "retract":
                assert_exact(new, completion, start=n0)
        for completion in later:  # not from prefixes cached under the old weights
            assert completion.versions.tolist() == [[1, 8]]
            assert_exact(new, completion)
        stats = await service.stats()
        assert (stats.tokens_lost, stats.tokens_kept > 0) == (0, True)


async def test_abort_resume_concatenates_exactly(model, server):
    server.slow_down(0.02)
    async with make_rollout(model, addresses=(server.url,)) as service:
        task = await started(service, make_requests(3, max_new_tokens=120))
        for version in (1, 2):
            await switch(service, model, version, SwitchMode.ABORT_RESUME)
        models = [versioned_model(model, version) for version in range(3)]
        for completion in await task:
            assert completion.versions[:, 1].sum() == 120
            end = 0
            for version, count in completion.versions.tolist():
                assert_exact(models[version], completion, start=end, stop=end + count)
                end += count
            assert {0, 2} <= set(completion.versions[:, 0].tolist())
        assert (await service.stats()).tokens_lost == 0


async def test_aborted_partial_goes_on_in_a_later_call(model, server):
    server.slow_down(0.02)
    async with make_rollout(model, addresses=(server.url,)) as service:
        (request,) = make_requests(1, max_new_tokens=100)
        task = await started(service, [request])
        assert await service.abort([request.key]) == 1
        (partial,) = await task
        assert (partial.finish_reason, len(partial.response_ids) < 100) == ("abort", True)
        server.slow_down(None)
        (whole,) = await collect(service.generate([replace(request, prefix=partial)]))
        assert len(whole.response_ids) == 100
        at = len(partial.response_ids)
        assert whole.response_ids[:at].tolist() == partial.response_ids.tolist()
        assert_exact(versioned_model(model, 0), whole)


async def test_abort_by_prefix_of_ids_hits_nobody_else(model, server):
    """SGLang ends every request whose id begins with the one given."""
    server.slow_down(0.02)
    async with make_rollout(model, addresses=(server.url,)) as service:
        requests = make_requests(12, max_new_tokens=60)
        task = await started(service, requests)
        assert await service.abort([requests[1].key]) == 1
        reasons = {c.key: c.finish_reason for c in await task}
        assert reasons.pop(requests[1].key) == "abort"
        assert set(reasons.values()) == {"length"}


async def test_paused_server_is_not_taken_for_dead(model, server):
    server.slow_down(0.01)
    options = {"poll_timeout_s": 2.0, "stall_s": 0.5, "wait_s": PATIENT}
    async with make_rollout(model, addresses=(server.url,), **options) as service:
        task = await started(service, make_requests(2, max_new_tokens=60))
        await service.pause()
        later = asyncio.ensure_future(collect(service.generate(make_requests(2, first=5))))
        looks, before = 0, await service.stats()
        answered = only(service).health.answered

        def counted(*arguments):
            nonlocal looks
            looks += 1
            answered(*arguments)

        only(service).health = Counting(only(service).health, counted)
        await eventually(lambda: looks >= 5, timeout_s=PATIENT)
        assert only(service).health.state is State.READY
        assert (await service.stats()).tokens_generated == before.tokens_generated
        assert not later.done()
        await service.resume()
        assert {c.finish_reason for c in await task} == {"length"}
        assert len(await later) == 2


class Counting:
    """A server's health, with every answer counted."""

    def __init__(self, health, answered):
        self._health = health
        self.answered = answered

    def __getattr__(self, name):
        return getattr(self._health, name)


async def test_prompt_that_would_end_the_server_never_reaches_it(service, server):
    """SGLang 0.5.23's scheduler dies of a token beyond the vocabulary."""
    good, bad = make_requests(2)
    for prompt, words in (((1, VOCAB), "allowed: 0..95"), ((1,) * 1020, "at most")):
        wrong = replace(bad, prompt_ids=np.array(prompt, np.int32))
        with pytest.raises(DataError, match=words):
            await collect(service.generate([good, wrong]))
    assert len(await collect(service.generate([good]))) == 1
    assert server.process.poll() is None


async def test_path_source_is_read_by_the_server(service, model, tmp_path):
    updated = versioned_model(model, 4)
    updated.save_pretrained(tmp_path / "v4")
    manifest = manifest_of(make_buckets(updated), 4)
    staged = await service.stage_weights(WeightSource(manifest, path=str(tmp_path / "v4")))
    assert staged.checksum == manifest.checksum
    await service.commit_weights(4, SwitchMode.DRAIN)
    for completion in await collect(service.generate(make_requests(3))):
        assert completion.versions.tolist() == [[4, 8]]
        assert_exact(updated, completion)


@pytest.mark.parametrize("fault", ["gone", "half"])
async def test_update_that_fails_never_serves_and_the_version_before_comes_back(
    service, model, fault
):
    """half: a file lacks a tensor. SGLang loads the rest and says all is well."""
    await switch(service, model, 1, SwitchMode.DRAIN)
    buckets = make_buckets(versioned_model(model, 2))
    await service.stage_weights(make_source(buckets, 2))
    (file,) = set(service._weights._staged.held.file_of.values())
    if fault == "gone":
        file.rename(file.with_suffix(".away"))
    else:
        from safetensors.numpy import load_file, save_file

        found = load_file(file)
        del found["model.layers.1.mlp.down_proj.weight"]
        file.unlink()
        save_file(found, file)
    with pytest.raises(EngineError, match="no server took version 2"):
        await service.commit_weights(2, SwitchMode.IN_FLIGHT)
    completions = await collect(service.generate(make_requests(4)))
    for completion in completions:
        assert completion.versions.tolist() == [[1, 8]]
        assert_exact(versioned_model(model, 1), completion)
    assert (await service.stats()).version == 1
    await switch(service, model, 3, SwitchMode.IN_FLIGHT)
    (completion,) = await collect(service.generate(make_requests(1)))
    assert_exact(versioned_model(model, 3), completion)


@pytest.mark.parametrize("mode", list(SwitchMode))
async def test_weights_proven_by_logprobs_where_no_checksum_can(model, server, mode):
    server.slow_down(0.01)
    options = {"verify": "logprobs", "addresses": (server.url,)}
    async with make_rollout(model, **options) as service:
        task = await started(service, make_requests(2, max_new_tokens=60))
        await switch(service, model, 1, mode)
        assert sum(c.versions[:, 1].sum() for c in await task) == 120
        (completion,) = await collect(service.generate(make_requests(1)))
        assert_exact(versioned_model(model, 1), completion)
        # A file that is changed after its proof was worked out: the difference is seen.
        await service.stage_weights(make_source(make_buckets(versioned_model(model, 2)), 2))
        (file,) = set(service._weights._staged.held.file_of.values())
        raw = bytearray(file.read_bytes())
        raw[-40000:] = bytes(40000)
        file.write_bytes(raw)
        with pytest.raises(EngineError, match="log-probs of the fixed prompt"):
            await service.commit_weights(2, mode)
        (completion,) = await collect(service.generate(make_requests(1)))
        assert completion.versions.tolist() == [[1, 8]]
        assert_exact(versioned_model(model, 1), completion)


async def test_weights_of_another_run_take_no_request_before_the_first_commit(model, server):
    async with make_rollout(model, addresses=(server.url,)) as service:
        await switch(service, model, 1, SwitchMode.DRAIN)
    async with make_rollout(model, addresses=(server.url,)) as service:
        later = asyncio.ensure_future(collect(service.generate(make_requests(2))))
        await eventually(lambda: "of another run" in only(service).line, timeout_s=PATIENT)
        assert not later.done()
        await switch(service, model, 0, SwitchMode.DRAIN)
        for completion in await later:
            assert completion.versions.tolist() == [[0, 8]]
            assert_exact(versioned_model(model, 0), completion)


async def test_server_with_other_weights_than_the_model_takes_no_request_before_a_commit(
    model, server, tmp_path
):
    other = save_model(tmp_path / "other", seed=1)
    async with make_rollout(other, addresses=(server.url,)) as service:
        later = asyncio.ensure_future(collect(service.generate(make_requests(2))))
        await eventually(lambda: "not hold version 0: tensor" in only(service).line, timeout_s=60)
        assert not later.done()
        await switch(service, other, 1, SwitchMode.DRAIN)
        for completion in await later:
            assert completion.versions.tolist() == [[1, 8]]
            assert_exact(versioned_model(other, 1), completion)


async def test_weights_that_were_loaded_in_part_are_trusted_by_nobody(model, server, monkeypatch):
    """The rollout ends between two buckets of the very first version."""
    push = Pusher._tensors

    async def once(pusher, held, part, common, ranks):
        if part[0].name not in first:
            first.append(part[0].name)
            if len(first) > 1:
                raise UnreachableError("ended here")
        await push(pusher, held, part, common, ranks)

    first = []
    options = {"addresses": (server.url,), "update": "tensor", "bucket_bytes": 30_000}
    async with make_rollout(model, **options) as service:
        monkeypatch.setattr(Pusher, "_tensors", once)
        with pytest.raises(EngineError, match="ended here"):
            await switch(service, model, 1, SwitchMode.DRAIN)
    monkeypatch.undo()
    server.call("/end_weight_update", {})
    async with make_rollout(model, **options) as service:
        later = asyncio.ensure_future(collect(service.generate(make_requests(2))))
        await eventually(lambda: "weights 'loading." in only(service).line, timeout_s=PATIENT)
        assert not later.done()
        await switch(service, model, 2, SwitchMode.DRAIN)
        for completion in await later:
            assert_exact(versioned_model(model, 2), completion)


async def test_requests_go_through_a_router_and_updates_to_each_server(model, servers, tmp_path):
    """sglang-router passes tokens on; everything else goes to the servers themselves."""
    from sglang_helpers import server_python

    from asyncflow_sglang.launch import free_port

    port, metrics = free_port(), free_port()
    with (tmp_path / "router.log").open("wb") as log:
        router = await asyncio.create_subprocess_exec(
            *(server_python(), "-m", "sglang_router.launch_router", "--worker-urls"),
            *(server.url for server in servers),
            *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)),
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        addresses = tuple(server.url for server in servers)
        async with make_rollout(model, addresses=addresses, router=url) as service:

            async def up():
                try:
                    return await collect(service.generate(make_requests(1)))
                except EngineError:
                    return False

            await eventually(up, timeout_s=PATIENT)
            for server in servers:
                server.slow_down(0.02)
            for version, mode in enumerate(SwitchMode, 1):
                task = await started(service, make_requests(8, max_new_tokens=60))
                await switch(service, model, version, mode)
                for completion in await task:
                    assert completion.versions[:, 1].sum() == 60
                    assert_exact(
                        versioned_model(model, version - 1),
                        completion,
                        stop=int(completion.versions[0, 1]),
                    )
                for completion in await collect(service.generate(make_requests(8, first=20))):
                    assert completion.versions.tolist() == [[version, 8]]
                    assert_exact(versioned_model(model, version), completion)
    finally:
        if router.returncode is None:
            router.kill()
        await router.wait()


def test_python_of_the_tests_has_no_sglang():
    """The user's side needs the adapter only."""
    assert "sglang" not in sys.modules
