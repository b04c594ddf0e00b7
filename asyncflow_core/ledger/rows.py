"""Rows, kept by the group.

All rows of a prompt group share one `Group`; what differs between them is a bit (alive, column
there, leased, done) or a small integer (tokens, oldest version). A *mask* is an int whose bit s
stands for sample s. One mask operation serves all rows of a group, and a row costs little memory:
masks of groups of up to eight rows are integers that CPython shares.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncflow_core.batch import GroupKey, Key
from asyncflow_core.errors import DataError
from asyncflow_core.services.data_store import RowInfo

if TYPE_CHECKING:
    from asyncflow_core.ledger.leases import LeaseRecord
    from asyncflow_core.ledger.tasks import Task

__all__ = [
    "MAX_SAMPLES",
    "Admission",
    "Group",
    "View",
    "locate",
    "masks_by_group",
    "row_number",
    "samples_in",
]

_SAMPLE_BITS = 16  # as wide as `sample` in a packed Key
MAX_SAMPLES = 1 << _SAMPLE_BITS
_NO_VERSION = -1


def row_number(group: int, sample: int) -> int:
    """The number of a row: never reused, and its group is found without a table of rows."""
    return group << _SAMPLE_BITS | sample


def locate(row: int) -> tuple[int, int]:
    """Group number and sample of a row; inverse of `row_number`."""
    return row >> _SAMPLE_BITS, row & (MAX_SAMPLES - 1)


def samples_in(mask: int) -> Iterator[int]:
    """The samples of a mask, ascending; costs the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def masks_by_group(rows: Iterable[int]) -> dict[int, int]:
    """Group number to mask, in the order in which groups first appear; a row twice is an error."""
    masks: dict[int, int] = {}
    for row in rows:
        group, sample = locate(row)
        mask = masks.get(group, 0)
        if mask >> sample & 1:
            raise DataError(f"row {row} is given twice; name each row once")
        masks[group] = mask | 1 << sample
    return masks


@dataclass(frozen=True, slots=True)
class Admission:
    """What the groups of one put have in common.

    Attributes:
        columns: names of the columns they come with.
        samples: rows a group.
        batch: global batch they are admitted to; None outside batches.
        partition: which tasks see them.
        row_bytes: the largest size of one row, reserved.
    """

    columns: tuple[str, ...]
    samples: int = 1
    batch: int | None = None
    partition: str = "train"
    row_bytes: int = 0


class View:
    """A group as one task sees it.

    Attributes:
        task: the task.
        leased: rows in a lease of the task.
        done: rows the task committed.
        offered: rows in the task's ready queue.
        leases: the leases that hold `leased`, so that a drop finds them.
    """

    __slots__ = ("done", "leased", "leases", "offered", "task")

    def __init__(self, task: Task) -> None:
        """Nothing done yet."""
        self.task = task
        self.leased = 0
        self.done = 0
        self.offered = 0
        self.leases: tuple[LeaseRecord, ...] = ()


class Group:
    """A prompt group: its living rows and how far each task is with them.

    Attributes:
        number: of the group in the store, never reused.
        key: its name for good.
        admission: what it came with, shared by the groups of one put.
        alive: rows neither freed nor dropped.
        completed: whether a row went all the way, that is, was freed without a drop.
        has: column number to the rows that have it.
        facts: of each row its tokens, prompt and response as far as they are there; then of each
            row the oldest version among its response's tokens, -1 while there is none. At
            `sample` and at `sample - samples`; one array, since every object of a group counts.
        views: one for each task that sees the group.
        place: where a shell keeps the payload, by its own numbering; nothing here looks at it.
    """

    __slots__ = (
        "admission", "alive", "completed", "facts", "has", "key", "number", "place", "views",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        key: GroupKey,
        admission: Admission,
        *,
        tokens: int,
        oldest: int | None,
        has: list[int],
        views: tuple[View, ...],
    ) -> None:
        """All rows alive, with equal `tokens` and `oldest` version."""
        samples = admission.samples
        self.number = number
        self.key = key
        self.admission = admission
        self.alive = (1 << samples) - 1
        self.completed = False
        self.has = has
        age = _NO_VERSION if oldest is None else oldest
        if samples == 1:
            self.facts = array("i", (tokens, age))
        else:
            self.facts = array("i", (tokens,)) * samples + array("i", (age,)) * samples
        self.views = views
        self.place = -1

    @property
    def batch(self) -> int | None:
        """The global batch the group was admitted to."""
        return self.admission.batch

    def view(self, task: Task) -> View:
        """How `task`, which sees the group, sees it."""
        for view in self.views:
            if view.task is task:
                return view
        raise KeyError(task.spec.name)

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

    def tokens_in(self, mask: int) -> int:
        """Tokens of these rows together."""
        return sum(self.facts[sample] for sample in samples_in(mask))

    def oldest_in(self, mask: int) -> int | None:
        """Oldest version among these rows; None when none has a response."""
        samples = self.admission.samples
        versions = [self.facts[sample - samples] for sample in samples_in(mask)]
        return min((v for v in versions if v != _NO_VERSION), default=None)

    def info(self, sample: int) -> RowInfo:
        """What a lease says of the row."""
        oldest = self.facts[sample - self.admission.samples]
        return RowInfo(
            row=row_number(self.number, sample),
            key=Key(*self.key, sample),
            batch=self.admission.batch,
            tokens=self.facts[sample],
            oldest_version=None if oldest == _NO_VERSION else oldest,
        )
