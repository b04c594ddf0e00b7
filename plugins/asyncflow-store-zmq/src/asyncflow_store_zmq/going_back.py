"""Taking back what later versions did, when a run goes on from an earlier one. Pure.

A row keeps its response if all its tokens are of the version or older. Else it is a prompt again,
and what tasks of whole groups made of its group goes, too. What tasks in the order of steps made
is of a step's weights, and goes for every row that is not trained. Tasks that write nothing did
their work outside the store: they get every row that is not trained again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from asyncflow_core.batch import Key
from asyncflow_core.errors import DataError
from asyncflow_core.ledger import Block, positions_in
from asyncflow_core.services.data_store import Order, TaskSpec

if TYPE_CHECKING:
    from asyncflow_store_zmq.table import Table

__all__ = ["go_back"]

VOID = "void: asked for in an earlier life of the run"


def go_back(table: Table, version: int, now: float) -> int:
    """Make a table whose rows nobody leases what it is at a version.

    Returns:
        How many rows are to be trained that had been.

    Raises:
        DataError: rows are gone that were trained after it.
    """
    if version < table.retained.version:
        raise DataError(
            f"rows cannot be brought back to version {version}: the model was saved at version "
            f"{table.retained.version}, so what trained it is gone"
        )
    tasks = list(table.tasks())
    trainers = [task for task in tasks if task.order is Order.STEP and not task.writes]
    undone = dict.fromkeys((task.name for task in trainers), 0)
    of_groups = _and_what_follows(tasks, lambda task: task.whole_groups)
    of_steps = _and_what_follows(tasks, lambda task: task.order is Order.STEP)
    count = 0
    for block, rows in table.retained.take_above(version):
        table.ledger.revive(block, rows, undone)
        count += rows.bit_count()
    outside: list[Key] = []
    for block in table.ledger.blocks():
        if block.batch is None:
            outside += map(block.key_at, positions_in(block.alive))
        else:
            count += _take_back(table, block, version, (of_groups, of_steps), now)
    table.ledger.drop(outside, reason=VOID)
    return count


def _take_back(
    table: Table, block: Block, version: int, made: tuple[set[str], set[str]], now: float
) -> int:
    """What later versions did to a block; how many rows are not trained any more.

    Args:
        table: whose block it is.
        block: of a batch.
        version: to go back to.
        made: tasks whose columns are of whole groups, and tasks whose columns are of steps.
        now: the time.
    """
    of_groups, of_steps = made
    table.retained.forget_above(block.number, version)
    mask = block.alive
    for rows in table.retained.trained.get(block.number, {}).values():
        mask &= ~rows
    void = table.lineage.void(block.number, mask, version)
    count = 0
    for task in [view.task.spec for view in block.views]:
        undone = void
        if not task.writes or task.name in of_steps:
            undone = mask
        elif task.name in of_groups:
            undone = block.whole(void) & mask
        again = table.ledger.undo(task.name, block, undone)
        table.payload.unwrite(block, undone, task, now)
        count += 0 if task.writes or task.order is not Order.STEP else again
    for row in positions_in(void):
        block.facts[row] -= table.lineage.tokens[block.number][row]
        block.facts[row - block.rows] = -1
    return count


def _and_what_follows(tasks: Iterable[TaskSpec], chosen: Callable[[TaskSpec], bool]) -> set[str]:
    """Tasks that write, are chosen or read columns of such."""
    writing = [task for task in tasks if task.writes]
    found = {task.name for task in writing if chosen(task)}
    while True:
        written = {column for task in writing if task.name in found for column in task.writes}
        more = {task.name for task in writing if written & set(task.reads)} - found
        if not more:
            return found
        found |= more
