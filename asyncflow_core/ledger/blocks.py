"""Blocks: prompt groups of one put whose sequences follow each other.

All rows of a block share one `Block`; what differs between them is a bit (alive, column there,
leased, done) or a small integer (tokens, oldest version). One mask operation serves all rows of a
block, so a put of 256 rows costs the ledger little more than a put of one.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from asyncflow_core.batch import GroupKey, Key
from asyncflow_core.ledger.masks import positions_in
from asyncflow_core.ledger.rows import NO_VERSION, Admission, row_number
from asyncflow_core.services.data_store import RowInfo

if TYPE_CHECKING:
    from asyncflow_core.ledger.leases import LeaseRecord
    from asyncflow_core.ledger.tasks import Task

__all__ = ["BLOCK_ROWS", "Block", "View"]

BLOCK_ROWS = 256
"""Most rows of a block of several groups: masks stay a few words, and the order in which rows are
handed out stays close to the order in which they became ready."""


class View:
    """A block as one task sees it.

    Attributes:
        task: the task.
        leased: rows in a lease of the task.
        done: rows the task committed.
        offered: rows in the task's ready queue.
        leases: by number the leases that hold `leased`, so that a drop finds them; None for none.
    """

    __slots__ = ("done", "leased", "leases", "offered", "task")

    def __init__(self, task: Task) -> None:
        """Nothing done yet."""
        self.task = task
        self.leased = 0
        self.done = 0
        self.offered = 0
        self.leases: dict[int, LeaseRecord] | None = None

    def hold(self, lease: LeaseRecord, mask: int) -> None:
        """Rows are in a lease from now on."""
        self.leased |= mask
        if self.leases is None:
            self.leases = {}
        self.leases[lease.lease_id] = lease

    def let_go(self, lease: LeaseRecord, mask: int, *, last: bool) -> None:
        """Rows are in a lease no longer; `last` when it has no other of this block."""
        self.leased &= ~mask
        if last and self.leases is not None:
            del self.leases[lease.lease_id]
            if not self.leases:
                self.leases = None


class Block:
    """Prompt groups put together, of one source and epoch, with sequences one after another.

    Rows lie group by group: row i is sample i % samples of group i // samples.

    Attributes:
        number: of the block in the store, never reused.
        origin: source and epoch of its groups.
        first: sequence of the first one.
        admission: what they came with, shared by the blocks of one put.
        alive: rows neither freed nor dropped.
        completed: rows that went all the way, that is, were freed without a drop.
        has: column number to the rows that have it.
        facts: of each row its tokens, prompt and response as far as they are there; then of each
            row the oldest version among its response's tokens, -1 while there is none. At
            `row` and at `row - rows`; one array, since every object of a block counts.
        views: one for each task that sees the block.
        place: where a shell keeps the payload; nothing here looks at it.
    """

    __slots__ = (
        "admission", "alive", "completed", "facts", "first", "has", "number", "origin", "place",
        "views",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        origin: tuple[int, int],
        first: int,
        admission: Admission,
        *,
        facts: array[int],
        has: list[int],
        views: tuple[View, ...],
    ) -> None:
        """All rows alive."""
        self.number = number
        self.origin = origin
        self.first = first
        self.admission = admission
        self.facts = facts
        self.alive = (1 << self.rows) - 1
        self.completed = 0
        self.has = has
        self.views = views
        self.place: Any = None

    @property
    def rows(self) -> int:
        """How many rows it was put with."""
        return len(self.facts) >> 1

    @property
    def groups(self) -> int:
        """How many groups it was put with."""
        return self.rows // self.admission.samples

    @property
    def batch(self) -> int | None:
        """The global batch its groups were admitted to."""
        return self.admission.batch

    def view(self, task: Task) -> View:
        """How `task`, which sees the block, sees it."""
        for view in self.views:
            if view.task is task:
                return view
        raise KeyError(task.spec.name)

    def view_of(self, name: str) -> View:
        """How the task of a name, which sees the block, sees it."""
        return next(view for view in self.views if view.task.spec.name == name)

    def ready(self, view: View) -> int:
        """Living rows with all columns the task reads, neither leased nor done."""
        mask = self.alive & ~view.leased & ~view.done
        for column in view.task.reads:
            mask &= self.has[column]
        return mask

    def done_by_all(self) -> int:
        """Living rows that no task still needs."""
        mask = self.alive
        for view in self.views:
            mask &= view.done
        return mask

    def whole(self, mask: int) -> int:
        """All rows of the groups that have a row in a mask."""
        samples, rows = self.admission.samples, self.rows
        if samples == 1 or not mask:
            return mask
        group = (1 << samples) - 1
        if rows == samples:
            return group
        firsts = ((1 << rows) - 1) // group
        some = 0
        for sample in range(samples):
            some |= mask >> sample & firsts
        return some * group

    def count_groups(self, mask: int) -> int:
        """How many groups have a row in a mask."""
        return self.whole(mask).bit_count() // self.admission.samples

    def groups_in(self, mask: int) -> Iterator[int]:
        """The rows of a mask by the group, ascending."""
        samples = self.admission.samples
        group = (1 << samples) - 1
        while mask:
            first = ((mask & -mask).bit_length() - 1) // samples * samples
            found = mask & group << first
            yield found
            mask ^= found

    def tokens_in(self, mask: int) -> int:
        """Tokens of these rows together."""
        return sum(self.facts[row] for row in positions_in(mask))

    def oldest_in(self, mask: int) -> int | None:
        """Oldest version among these rows; None when none has a response."""
        rows = self.rows
        versions = [self.facts[row - rows] for row in positions_in(mask)]
        return min((v for v in versions if v != NO_VERSION), default=None)

    def learn(self, first: int, tokens: Sequence[int], oldest: Sequence[int]) -> None:
        """New columns of a run: the tokens they add, and oldest versions (-1: none); or empty."""
        facts = self.facts
        if tokens:
            last = first + len(tokens)
            facts[first:last] = array("i", map(operator.add, facts[first:last], tokens))
        if oldest:
            at = self.rows + first
            known = facts[at : at + len(oldest)]
            facts[at : at + len(oldest)] = array(
                "i", [old if new < 0 else new for old, new in zip(known, oldest, strict=True)]
            )

    def group_at(self, row: int) -> GroupKey:
        """The group of a row."""
        return GroupKey(*self.origin, self.first + row // self.admission.samples)

    def key_at(self, row: int) -> Key:
        """The key of a row."""
        group, sample = divmod(row, self.admission.samples)
        return Key(*self.origin, self.first + group, sample)

    def keys(self, first: int, last: int) -> list[tuple[int, int, int, int]]:
        """The keys of a run, as plain tuples."""
        source, epoch = self.origin
        samples, begin = self.admission.samples, self.first
        return [
            (source, epoch, begin + row // samples, row % samples) for row in range(first, last)
        ]

    def group_mask(self, sequence: int) -> int:
        """The rows of one of its groups."""
        samples = self.admission.samples
        return ((1 << samples) - 1) << (sequence - self.first) * samples

    def info(self, row: int) -> RowInfo:
        """What a lease says of a row."""
        oldest = self.facts[row - self.rows]
        return RowInfo(
            row=row_number(self.number, row),
            key=self.key_at(row),
            batch=self.admission.batch,
            tokens=self.facts[row],
            oldest_version=None if oldest == NO_VERSION else oldest,
        )
