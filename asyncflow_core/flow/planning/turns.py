"""Tasks that take turns over a whole batch: the order of the `sequential` preset. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asyncflow_core.services.data_store import TaskSpec

__all__ = ["in_turns"]


def in_turns(tasks: Sequence[TaskSpec], groups: int) -> list[TaskSpec]:
    """The same tasks, of which one at a time works on a batch, and on all of it.

    They go in the order of the dataflow; of those that need nothing of each other the ones that
    work on held-out rows, too, come first, then it goes by name. Each waits for a column that the
    one before it writes, until `groups` groups of the batch have it. Held-out rows belong to no
    batch, and pass as they come.

    Args:
        tasks: of a dataflow without a fault; the first has no other before it, the last none after.
        groups: prompt groups of a batch.
    """
    first, *between, last = tasks
    before, found = first, [first]
    for task in [*_ordered(between), last]:
        if "train" in task.partitions:
            waits = () if set(before.writes) & set(task.reads) else before.writes[:1]
            reads = (*task.reads, *waits)
            task = replace(task, reads=reads, whole_groups=True, batch_groups=groups)
            before = task if task.writes else before
        found.append(task)
    return found


def _ordered(tasks: Sequence[TaskSpec]) -> list[TaskSpec]:
    """In the order of the dataflow: each after all whose columns it reads.

    A task that passes held-out rows reads only from such tasks, so that none of them comes after
    one that does not, and waits for a column that held-out rows never get.
    """
    left = sorted(tasks, key=lambda task: ("eval" not in task.partitions, task.name))
    found: list[TaskSpec] = []
    while left:
        awaited = {column for task in left for column in task.writes}
        free = next(task for task in left if not awaited & set(task.reads))
        left.remove(free)
        found.append(free)
    return found
