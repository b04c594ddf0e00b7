"""The task that judges whole groups before trainer and recorder can get them."""

from collections import Counter
from dataclasses import replace

import numpy as np

from asyncflow_core.batch import Batch, Column
from asyncflow_core.flow.running.filtering import FAILED, FILTER, KEPT, filter_task, filter_work
from asyncflow_core.flow.running.policies.dynamic_sampling import ALL_EQUAL, DynamicSampling
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.aio import eventually

BOTH = ("train", "eval")
SCORE = TaskSpec("score", ("prompt_ids",), ("reward", "versions", "response_ids"), partitions=BOTH)
TRAIN = TaskSpec("train", ("reward", KEPT), whole_groups=True, partitions=BOTH)


async def score(store, rewards, errors=None):
    """Three tokens a response."""
    lease = await store.lease("score", requester="s", limit_rows=len(rewards))
    count = len(lease.rows)
    said = {} if errors is None else {"reward_error": Column.objects(errors)}
    await store.commit(
        lease.ref(),
        writes=Batch(
            {
                **said,
                "reward": Column.dense(rewards, np.float32),
                "versions": Column.ragged([np.array([[0, 2], [1, 1]], np.int32)] * count, np.int32),
                "response_ids": Column.ragged([[1, 2, 3]] * count, np.int32),
            }
        ),
    )


async def test_filter_drops_groups_that_do_not_differ_and_counts_their_tokens(store, put, start):
    sampling, wasted = DynamicSampling(), Counter()
    for task in (SCORE, TRAIN):
        await store.register(task)
    await start(
        filter_task(errors=False),
        filter_work(sampling, wasted),
        requester=FILTER,
        rows_in_flight=64,
    )
    await put(3, samples=2, batch=0)
    await put(1, samples=2, partition="eval", first=9)
    await score(store, [0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0])  # the last one is held out

    async def judged():
        return (await store.stats()).tasks[FILTER].committed == 4

    await eventually(judged)
    lease = await store.lease("train", requester="t")
    assert {info.key.group.sequence for info in lease.rows} == {1, 9}
    stats = await store.stats()
    assert stats.rows_dropped == {ALL_EQUAL: 4}
    assert {group.group.sequence for group in stats.dropped_groups} == {0, 2}
    assert (sampling.kept, sampling.groups, sampling.rows, sampling.tokens) == (1, 2, 4, 12)
    assert wasted == {ALL_EQUAL: 12}
    assert (await store.read(lease.ref(), (KEPT,)))[KEPT].array.tolist() == [1] * 4


async def test_filter_drops_groups_whose_rewards_all_failed_with_the_first_error(store, put, start):
    wasted = Counter()
    judged = replace(SCORE, writes=(*SCORE.writes, "reward_error"))
    for task in (judged, TRAIN):
        await store.register(task)
    work = filter_work(DynamicSampling(), wasted)
    await start(filter_task(errors=True), work, requester=FILTER, rows_in_flight=64)
    await put(2, samples=2, batch=0)
    await score(store, [0.0] * 4, ["KeyError: 'a'", "KeyError: 'b'", "KeyError: 'c'", None])

    async def dropped():
        return len((await store.stats()).dropped_groups) == 2

    await eventually(dropped)
    stats = await store.stats()
    assert stats.rows_dropped == {FAILED: 2, ALL_EQUAL: 2}
    reasons = {group.group.sequence: group.reason for group in stats.dropped_groups}
    assert reasons == {0: f"{FAILED}: KeyError: 'a'", 1: ALL_EQUAL}
    assert wasted == {FAILED: 6, ALL_EQUAL: 6}
