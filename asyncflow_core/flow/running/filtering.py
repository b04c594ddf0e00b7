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

__all__ = ["FAILED", "FILTER", "KEPT", "filter_task", "filter_work"]

FILTER = "filter"
"""Name of the task."""
KEPT = "kept"
"""The column it writes, uint8: 1."""
FAILED = "all rewards failed"
"""The reason that groups are dropped with of which no reward was given."""

_PARTITIONS = ("train", "eval")


def filter_task(*, errors: bool) -> TaskSpec:
    """What it reads and writes; held-out groups pass unseen. `errors`: there is a reward_error."""
    reads = ("reward", "versions", *(("reward_error",) if errors else ()))
    return TaskSpec(FILTER, reads, (KEPT,), True, _PARTITIONS)


def filter_work(sampling: DynamicSampling, wasted: Counter[str]) -> Work:
    """Judge whole groups; `wasted` counts the response tokens of those thrown away."""

    async def work(lease: Lease, batch: Batch) -> AsyncGenerator[Part, None]:
        groups: dict[GroupKey, list[int]] = {}
        for at, info in enumerate(lease.rows):
            groups.setdefault(info.key.group, []).append(at)
        rewards, kept = batch["reward"].array.tolist(), []
        errors = list(batch["reward_error"]) if "reward_error" in batch else [None] * batch.rows
        tokens = [int(versions[:, 1].sum()) for versions in batch["versions"]]
        for places in groups.values():
            held_out = lease.rows[places[0]].batch is None
            count = sum(tokens[at] for at in places)
            if held_out or sampling.keep([rewards[at] for at in places], count):
                kept += places
            else:
                failed = all(errors[at] for at in places)
                cause = FAILED if failed else ALL_EQUAL
                wasted[cause] += count
                reason = f"{cause}: {errors[places[0]]}" if failed else cause
                yield Part([lease.rows[at] for at in places], drop=reason)
        if kept:
            writes = Batch({KEPT: Column.dense(np.ones(len(kept), np.uint8))})
            yield Part([lease.rows[at] for at in kept], writes)

    return work
