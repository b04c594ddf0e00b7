import asyncio
from dataclasses import replace

import numpy as np
import pytest

from asyncflow_core.batch import Key
from asyncflow_core.errors import DataError, EngineError, UnsupportedCapabilityError
from asyncflow_core.parts import PartContext
from asyncflow_core.reference.tabular import TabularModel, log_softmax
from asyncflow_core.reference.tabular_rollout import TabularRollout, TabularRolloutOptions
from asyncflow_core.reference.tabular_weights import write_weights
from asyncflow_core.services.rollout import (
    Completion,
    GenerateRequest,
    SamplingParams,
    SwitchMode,
)
from asyncflow_core.services.weight_sync import Bucket, WeightSource
from asyncflow_core.testing.aio import collect, eventually, manifest_of, stream

OPTIONS = {"vocab_size": 6, "positions": 4, "previous_token": True, "init_scale": 1.0}


def options(**changes):
    return TabularRolloutOptions(**{**OPTIONS, **changes})


@pytest.fixture
async def rollout():
    async with TabularRollout(options(), PartContext()) as service:
        yield service


def request(sample=0, *, seed=None, prompt=(3, 1), **sampling):
    params = SamplingParams(**{"max_new_tokens": 8, **sampling})
    ids = np.array(prompt, np.int32)
    return GenerateRequest(Key(0, 0, 0, sample), ids, params, sample if seed is None else seed)


def source(version):
    model = TabularModel(options(init_seed=version), PartContext())
    buckets = [Bucket(b.specs, b.data.copy()) for b in write_weights(model, 4000)]
    return WeightSource(manifest_of(buckets, version), buckets=stream(buckets))


async def test_logprobs_equal_independent_computation(rollout):
    temperature = 0.7
    (completion,) = await collect(rollout.generate([request(temperature=temperature)]))
    table = TabularModel(options(), PartContext())
    previous = 1
    for position, token in enumerate(completion.response_ids):
        logits = table.logits[min(position, 3), 1 * 6 + previous] / temperature
        expected = logits[token] - np.log(np.exp(logits).sum())
        assert completion.behaviour_logprobs[position] == pytest.approx(expected, rel=1e-6)
        previous = token


async def test_first_token_frequencies_are_the_probabilities(rollout):
    count = 3000
    requests = [request(seed=seed, max_new_tokens=1) for seed in range(count)]
    completions = await collect(rollout.generate(requests))
    share = np.bincount([c.response_ids[0] for c in completions], minlength=6) / count
    probs = np.exp(log_softmax(TabularModel(options(), PartContext()).logits[0, 1 * 6 + 1]))
    np.testing.assert_allclose(share, probs, atol=6 * 0.5 / count**0.5)


@pytest.mark.parametrize("mode", [SwitchMode.IN_FLIGHT, SwitchMode.ABORT_RESUME])
async def test_switch_paused_engine_versions_exact_to_the_token(rollout, mode):
    plain = await collect(rollout.generate([request(s, max_new_tokens=40) for s in range(3)]))
    before = (await rollout.stats()).tokens_generated
    requests = [request(s, max_new_tokens=40) for s in range(3)]
    task = asyncio.ensure_future(collect(rollout.generate(requests)))

    async def some() -> bool:
        return (await rollout.stats()).tokens_generated >= before + 3 * 5

    await eventually(some)
    await rollout.pause()
    done = ((await rollout.stats()).tokens_generated - before) // 3
    await rollout.stage_weights(source(1))
    await rollout.commit_weights(1, mode)
    await rollout.resume()
    completions = {c.key: c for c in await task}
    table = TabularModel(options(init_seed=1), PartContext())
    for old in plain:
        new = completions[old.key]
        assert new.versions.tolist() == [[0, done], [1, 40 - done]]
        assert new.response_ids[:done].tolist() == old.response_ids[:done].tolist()
        logits = table.rows[table.context(1, done, int(new.response_ids[done - 1]))]
        expected = log_softmax(logits)[new.response_ids[done]]
        assert new.behaviour_logprobs[done] == np.float32(expected)
    stats = await rollout.stats()
    assert (stats.tokens_kept, stats.tokens_lost) == (3 * done, 0)


async def test_slots_full_rest_waits_and_all_end():
    async with TabularRollout(options(slots=2), PartContext()) as rollout:
        task = asyncio.ensure_future(collect(rollout.generate([request(s) for s in range(5)])))

        async def full() -> bool:
            stats = await rollout.stats()
            return (stats.running, stats.waiting) == (2, 3)

        await eventually(full)
        assert len(await task) == 5


async def test_drain_while_draining_cancelled_admits_again(rollout):
    endless = asyncio.ensure_future(collect(rollout.generate([request(max_new_tokens=10**9)])))

    async def runs() -> bool:
        return (await rollout.stats()).running == 1

    await eventually(runs)
    await rollout.stage_weights(source(1))
    commit = asyncio.ensure_future(rollout.commit_weights(1, SwitchMode.DRAIN))
    await asyncio.sleep(0)
    commit.cancel()
    await asyncio.gather(commit, return_exceptions=True)
    assert len(await collect(rollout.generate([request(1)]))) == 1
    await rollout.commit_weights(1, SwitchMode.IN_FLIGHT)
    assert len(await collect(rollout.generate([request(2)]))) == 1  # tokens for both
    await rollout.abort()
    assert (await endless)[0].versions[:, 0].tolist() == [0, 1]


async def test_stop_ids_and_eos_end_and_are_kept():
    async with TabularRollout(options(eos_token_id=2), PartContext()) as rollout:
        requests = [request(s, max_new_tokens=200, stop_token_ids=(4,)) for s in range(30)]
        completions = await collect(rollout.generate(requests))
    assert {int(c.response_ids[-1]) for c in completions} == {2, 4}
    for completion in completions:
        assert completion.finish_reason == "stop"
        assert not {2, 4} & set(completion.response_ids[:-1].tolist())


async def test_prefix_that_is_whole_ends_without_a_token(rollout):
    prefix = Completion(
        Key(0, 0, 0, 0),
        np.arange(3, dtype=np.int32),
        np.full(3, -1.0, np.float32),
        np.array([[5, 3]], np.int32),
        "abort",
    )
    whole = replace(request(max_new_tokens=3), prefix=prefix)
    (completion,) = await collect(rollout.generate([whole]))
    assert (completion.finish_reason, len(completion.response_ids)) == ("length", 3)
    assert (await rollout.stats()).tokens_generated == 0
    alien = replace(whole, prefix=replace(prefix, key=Key(0, 0, 0, 9)))
    with pytest.raises(DataError, match="prefix is of 0/0/0/9"):
        await collect(rollout.generate([alien]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 2.0),
    ],
)
async def test_sampling_out_of_range_names_request_and_field(rollout, name, value):
    with pytest.raises(DataError, match=rf"0/0/0/7: {name} is"):
        await collect(rollout.generate([request(7, **{name: value})]))


async def test_path_source_refused(rollout):
    manifest = source(1).manifest
    with pytest.raises(UnsupportedCapabilityError, match="path"):
        await rollout.stage_weights(WeightSource(manifest, path="/nowhere"))


async def test_engine_failure_reaches_those_who_wait_and_come_later(rollout, monkeypatch):
    def fail(*args):
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("asyncflow_core.reference.tabular_rollout.draw_tokens", fail)
    for _ in range(2):
        with pytest.raises(EngineError, match="boom"):
            await collect(rollout.generate([request()]))


async def test_close_early_counts_lost_tokens(rollout):
    completions = rollout.generate([request(0, max_new_tokens=1), request(1, max_new_tokens=10**9)])
    await anext(completions)
    await completions.aclose()
    stats = await rollout.stats()
    assert (stats.running, stats.tokens_lost) == (0, stats.tokens_generated - 1)
