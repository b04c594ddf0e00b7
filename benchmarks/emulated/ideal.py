"""What a step of the emulated workload takes where nothing costs time but the work itself.

Everybody takes what is ready at once, in the order of its keys, and rows, weights and words travel
in no time. At bound 0 every step begins with nothing under way, so it is known by itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
from asyncflow_emulated import GROUPS, ROWS, SAMPLES, length_of, lengths, loads

from asyncflow_core.batch import Key

__all__ = ["sequential", "streaming"]

Times = Sequence[float]
_REPLICAS = 2


def sequential(batches: Sequence[int]) -> float:
    """Mean steps a batch takes: one stage after another; rows fall to replicas by their keys."""
    load, found = loads(), []
    for batch in batches:
        rows = _rows(batch)
        shares = [
            [s for at, s in enumerate(rows) if (sum(divmod(at, SAMPLES))) % _REPLICAS == number]
            for number in range(_REPLICAS)
        ]
        slots = load.slots // _REPLICAS
        rollout = max(max(_slots(share, slots)) for share in shares)
        found.append(rollout + load.reference + load.reward + load.advantage + 1.0)
    return float(np.mean(found))


def streaming(batches: Sequence[int]) -> float:
    """Mean steps a batch takes: rows, then whole groups, go on as soon as they are ready."""
    load, found = loads(), []
    for batch in batches:
        rows = _rows(batch)
        work = float(sum(rows))
        ended = _slots(rows, load.slots)
        reference = _server(ended, lambda at, r=rows, w=work: load.reference * r[at] / w)
        reward = _server(ended, lambda at: load.reward / ROWS)
        advantage = _server(_groups(reward), lambda at: load.advantage / GROUPS)
        ready = [max(pair) for pair in zip(advantage, _groups(reference), strict=True)]
        sums = np.reshape(rows, (GROUPS, SAMPLES)).sum(1) / work
        found.append(max(_server(ready, lambda at, s=sums: float(s[at]))))
    return float(np.mean(found))


def _rows(batch: int) -> list[float]:
    """Steps that each response of a batch takes in its slot."""
    work = loads().rollout * loads().slots / float(lengths().sum())
    keys = [Key(0, 0, batch * GROUPS + at // SAMPLES, at % SAMPLES) for at in range(ROWS)]
    return [length_of(key) * work for key in keys]


def _groups(rows: Times) -> list[float]:
    """When the last of each group is done."""
    return [float(t) for t in np.reshape(rows, (GROUPS, SAMPLES)).max(1)]


def _slots(rows: Times, slots: int) -> list[float]:
    """When each ends, if they take slots in their order."""
    free, ends = [0.0] * slots, []
    for seconds in rows:
        ends.append(heapq.heappop(free) + seconds)
        heapq.heappush(free, ends[-1])
    return ends


def _server(ready: Times, takes: Callable[[int], float]) -> list[float]:
    """When one worker is done with each, in the order in which they become ready."""
    now, done = 0.0, [0.0] * len(ready)
    for at in sorted(range(len(ready)), key=lambda at: ready[at]):
        now = done[at] = max(now, ready[at]) + takes(at)
    return done
