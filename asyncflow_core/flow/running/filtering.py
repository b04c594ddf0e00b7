"""The flow's own task `filter`, with dynamic sampling: it lets groups through, or drops them.

It is a stage like any other, in the run's own process: the trainer and the recorder read the column
it writes, so neither can get a group before it was judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator

import numpy as np

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.flow.running.policies.dynamic_sampling import ALL_EQUAL, DynamicSampling
from asyncflow_core.flow.working.worker import Part, Work
from asyncflow_core.services.data_store import Lease, TaskSpec

__all__ = ["FILTER", "KEPT", "filter_task", "filter_work"]

FILTER = "filter"
"""Name of the task."""
KEPT = "kept"
"""The column it writes, uint8: 1."""

_PARTITIONS = ("train", "eval")


def filter_task() -> TaskSpec:
    """What it reads and writes; held-out groups pass unseen."""
    reads = ("reward", "versions")
    return TaskSpec(FILTER, reads, (KEPT,), True, _PARTITIONS)


def filter_work(sampling: DynamicSampling, wasted: Counter[str]) -> Work:
    """Judge whole groups; `wasted` counts the response tokens of those thrown away."""

    async def work(lease: Lease, batch: Batch) -> AsyncGenerator[Part, None]:
        groups: dict[GroupKey, list[int]] = {}
        for at, info in enumerate(lease.rows):
            groups.setdefault(info.key.group, []).append(at)
        rewards, kept = batch["reward"].array.tolist(), []
        tokens = [int(versions[:, 1].sum()) for versions in batch["versions"]]
        for places in groups.values():
            held_out = lease.rows[places[0]].batch is None
            count = sum(tokens[at] for at in places)
            if held_out or sampling.keep([rewards[at] for at in places], count):
                kept += places
            else:
                wasted[ALL_EQUAL] += count
                yield Part([lease.rows[at] for at in places], drop=ALL_EQUAL)
        if kept:
            writes = Batch({KEPT: Column.dense(np.ones(len(kept), np.uint8))})
            yield Part([lease.rows[at] for at in kept], writes)

    return work
