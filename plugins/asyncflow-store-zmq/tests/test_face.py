"""The paper's service face, and shares for data-parallel ranks."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncflow_core.batch import Key
from asyncflow_core.errors import DataError
from asyncflow_core.services.data_store import RowInfo, TaskSpec
from asyncflow_core.testing.data_store import prompts, rewards
from asyncflow_store_zmq.face import AsyncExperiences, Experiences
from asyncflow_store_zmq.shares import balanced_shares

REWARD = TaskSpec("reward", ("prompt_ids",), ("reward",))
TRAIN = TaskSpec("train", ("prompt_ids", "reward"))


async def test_face_blocking_moves_prompts_through_two_tasks(serve):
    def run(options):
        with Experiences(options["connect"], token=options["token"]) as pipeline:
            pipeline.register(REWARD)
            pipeline.register(TRAIN)
            assert len(pipeline.put_prompts(prompts(3), samples=2)) == 3
            scored = pipeline.get_experience("reward", ["prompt_ids"], rows=10)
            pipeline.put_experience(scored, rewards(6))
            trained = pipeline.get_experience("train", ["reward"], rows=10)
            pipeline.put_experience(trained)
            pipeline.notify_weights(3, {"path": "weights"})
            assert pipeline.wait_weights(after=2) == (3, {"path": "weights"})
            assert pipeline.wait_weights(after=3, wait_s=0.05) is None
            assert pipeline.get_experience("train", ["reward"], rows=1, wait_s=0.05) is None
            return trained.batch, pipeline.store.stats().rows

    async with serve() as options:
        batch, rows = await asyncio.to_thread(run, options)
    np.testing.assert_array_equal(batch["reward"].array, np.ones(6, np.float32))
    assert rows == 0


async def test_face_async_wakes_who_waits_for_weights(serve):
    async with (
        serve() as options,
        AsyncExperiences(options["connect"], token=options["token"]) as pipeline,
    ):
        await pipeline.register(REWARD)
        await pipeline.put_prompts(prompts(2))
        waiting = asyncio.create_task(pipeline.wait_weights(after=-1, wait_s=10))
        found = await pipeline.get_experience("reward", ["prompt_ids"], rows=8)
        await pipeline.put_experience(found, rewards(2))
        await pipeline.notify_weights(0)
        assert await waiting == (0, None)


async def test_prompts_under_the_keys_of_another_pipeline_are_not_left_out_in_silence(serve):
    def run(options):
        with Experiences(options["connect"], token=options["token"]) as one:
            one.register(REWARD)
            one.put_prompts(prompts(3))
            assert one.put_prompts(prompts(3), keys=[(0, 0, i) for i in range(3)])  # as was asked

    async with serve() as options:
        await asyncio.to_thread(run, options)
        async with AsyncExperiences(options["connect"], token=options["token"]) as again:
            with pytest.raises(DataError, match=r"3 of 5 .* source 0"):
                await again.put_prompts(prompts(5))
        async with AsyncExperiences(options["connect"], token=options["token"], source=1) as other:
            assert len(await other.put_prompts(prompts(5))) == 5


def test_balanced_shares_even_tokens_and_lose_nothing():
    rng = np.random.default_rng(0)
    rows = [RowInfo(i, Key(0, 0, i, 0), tokens=int(rng.integers(64, 2048))) for i in range(64)]
    shares = balanced_shares(rows, 4)
    assert sorted(info.row for share in shares for info in share) == list(range(64))
    tokens = [sum(info.tokens for info in share) for share in shares]
    assert max(tokens) - min(tokens) < 0.02 * sum(tokens)
