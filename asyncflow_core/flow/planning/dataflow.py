"""Checking the dataflow that the columns imply, before anything starts. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncflow_core.services.data_store import TaskSpec

__all__ = ["DataflowFault", "dataflow_faults"]


_MADE_BY = {
    "reward": "; a stage such as `reward: {function: 'module:name', kind: reward}` writes it",
    "advantages": "; a stage such as `advantage: {plugin: grpo}` writes it",
}


@dataclass(frozen=True, slots=True)
class DataflowFault:
    """What is wrong, and the task where it shows."""

    task: str
    message: str


def dataflow_faults(
    tasks: Sequence[TaskSpec], prompt_columns: Iterable[str]
) -> list[DataflowFault]:
    """Everything wrong with a dataflow: two writers, a column nobody writes, a cycle.

    Args:
        tasks: all tasks of a run.
        prompt_columns: columns that prompts bring.
    """
    writers: dict[str, list[TaskSpec]] = {}
    for task in tasks:
        for column in task.writes:
            writers.setdefault(column, []).append(task)
    brought = set(prompt_columns)
    faults = [
        DataflowFault(
            found[-1].name,
            f"column {column!r} has {len(found)} writers, one is allowed: "
            f"{', '.join(repr(task.name) for task in found)}",
        )
        for column, found in writers.items()
        if len(found) > 1
    ]
    faults += [
        DataflowFault(
            found[0].name,
            f"column {column!r} is written by {found[0].name!r}, but prompts bring it already",
        )
        for column, found in writers.items()
        if column in brought
    ]
    for task in tasks:
        for column in task.reads:
            if column not in brought:
                faults.extend(
                    DataflowFault(task.name, message)
                    for message in _unwritten(
                        task, column, writers.get(column, []), brought | set(writers)
                    )
                )
    return faults or _cycle(tasks, writers)


def _unwritten(
    task: TaskSpec, column: str, writers: Sequence[TaskSpec], known: Iterable[str]
) -> list[str]:
    if not writers:
        near = difflib.get_close_matches(column, sorted(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else _MADE_BY.get(column, "")
        return [
            f"task {task.name!r} reads the column {column!r}, which nobody writes "
            f"(there are: {', '.join(sorted(known))}){hint}"
        ]
    missing = set(task.partitions) - {p for writer in writers for p in writer.partitions}
    if missing:
        return [
            f"task {task.name!r} reads {column!r} on {sorted(missing)} rows, but "
            f"{writers[0].name!r} writes it only on {list(writers[0].partitions)} rows"
        ]
    return []


def _cycle(tasks: Sequence[TaskSpec], writers: dict[str, list[TaskSpec]]) -> list[DataflowFault]:
    """Tasks that wait for each other; each column has at most one writer here."""
    needs = {
        task.name: {found.name for column in task.reads for found in writers.get(column, [])}
        for task in tasks
    }
    while True:
        # Those that wait for nobody, and those that nobody waits for, are on no cycle.
        needed = set().union(*needs.values()) if needs else set()
        free = {n for n, before in needs.items() if n not in needed or not before & set(needs)}
        if not free:
            break
        needs = {name: before for name, before in needs.items() if name not in free}
    if not needs:
        return []
    names = sorted(needs)
    waiting = f"tasks {', '.join(map(repr, names))} wait for each other's columns"
    return [DataflowFault(names[0], waiting)]
