"""Checking the dataflow that the columns imply, before anything starts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncflow_core.services.data_store import TaskSpec

__all__ = ["dataflow_faults"]


def dataflow_faults(tasks: Sequence[TaskSpec], prompt_columns: Iterable[str]) -> list[str]:
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
        f"column {column!r} has {len(found)} writers, one is allowed: "
        f"{', '.join(repr(task.name) for task in found)}"
        for column, found in writers.items()
        if len(found) > 1
    ]
    faults += [
        f"column {column!r} is written by {found[0].name!r}, but prompts bring it already"
        for column, found in writers.items()
        if column in brought
    ]
    for task in tasks:
        for column in task.reads:
            if column not in brought:
                faults.extend(
                    _unwritten(task, column, writers.get(column, []), brought | set(writers))
                )
    return faults or _cycle(tasks, writers)


def _unwritten(
    task: TaskSpec, column: str, writers: Sequence[TaskSpec], known: Iterable[str]
) -> list[str]:
    if not writers:
        return [
            f"task {task.name!r} reads the column {column!r}, which nobody writes "
            f"(there are: {', '.join(sorted(known))})"
        ]
    missing = set(task.partitions) - {p for writer in writers for p in writer.partitions}
    if missing:
        return [
            f"task {task.name!r} reads {column!r} on {sorted(missing)} rows, but "
            f"{writers[0].name!r} writes it only on {list(writers[0].partitions)} rows"
        ]
    return []


def _cycle(tasks: Sequence[TaskSpec], writers: dict[str, list[TaskSpec]]) -> list[str]:
    """Tasks that wait for each other; each column has at most one writer here."""
    needs = {
        task.name: {found.name for column in task.reads for found in writers.get(column, [])}
        for task in tasks
    }
    while True:
        free = {name for name, before in needs.items() if not before & set(needs)}
        if not free:
            break
        needs = {name: before for name, before in needs.items() if name not in free}
    if not needs:
        return []
    return [
        f"tasks {', '.join(repr(name) for name in sorted(needs))} wait for each other's columns"
    ]
