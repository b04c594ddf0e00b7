"""DataStore: the table through which samples stream.

Rows are samples, columns are fields, produced and consumed by *tasks*. A row is ready for a task
when the last column it reads is there; nobody wires producers to consumers.
`docs/spec/data_store.md` numbers what every implementation must hold (DS-n).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

from asyncflow_core.batch import Batch, BatchRef, GroupKey, Key
from asyncflow_core.services.base import Service

__all__ = [
    "LEASE_POLICIES",
    "NO_DROPS",
    "CommitResult",
    "DataStore",
    "DataStoreCapabilities",
    "DroppedGroup",
    "Lease",
    "Order",
    "PutResult",
    "Registration",
    "RowInfo",
    "StoreStats",
    "SupportsAttach",
    "SupportsDurability",
    "SupportsEviction",
    "TaskSpec",
    "TaskStats",
]


NO_DROPS = 1 << 62
"""No dropped group has so high a serial."""
LEASE_POLICIES: Final = frozenset({"fifo", "stalest_first", "token_balanced"})
"""Which every data store has."""


class Order(StrEnum):
    """What the `version` of a lease means to a task.

    ANY: no version; rows in the order the lease policy gives.
    ADMITTED: the version a replica serves; rows of batch b only at version >= b - max_staleness,
        oldest batch first. Rows outside batches (b is None) come before them: who puts those
        bounds how many there are at a time.
    STEP: the step being trained; rows of exactly that batch.
    """

    ANY = "any"
    ADMITTED = "admitted"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task: what it reads and writes, and in which order it gets rows.

    Attributes:
        name: unique among the registered tasks.
        reads: columns that must be there before a row is handed out, and may be read.
        writes: columns the task's commits write; one writer a column.
        whole_groups: hand out a prompt group only when each of its rows is ready or dropped, and
            then all of it in one lease.
        partitions: rows of which partitions the task sees ("train", "eval").
        order: what the `version` of a lease means.
        batch_groups: hand out rows of a global batch only once this many of its groups are whole;
            0 for at once. Rows outside batches never wait. Needs `whole_groups`.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    whole_groups: bool = False
    partitions: tuple[str, ...] = ("train",)
    order: Order = Order.ANY
    batch_groups: int = 0


@dataclass(frozen=True, slots=True)
class RowInfo:
    """What a lease says of one row, without reading it.

    Attributes:
        row: number in the store, valid while the row lives.
        key: its name for good.
        batch: index of the global batch it was admitted to; None outside batches.
        tokens: prompt and response tokens, as far as they are there.
        oldest_version: of its response's tokens; None while there is no response.
    """

    row: int
    key: Key
    batch: int | None = None
    tokens: int = 0
    oldest_version: int | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """Rows handed to one requester until committed, released or expired.

    Attributes:
        lease_id: number of the lease, never used again.
        task: the task it belongs to.
        requester: who asked, as named in the wait-for graph.
        fence: hand-out number, strictly increasing over a task's leases.
        lease_s: seconds after which it expires unless renewed.
        rows: what was handed out.
    """

    lease_id: int
    task: str
    requester: str
    fence: int
    lease_s: float
    rows: tuple[RowInfo, ...]

    def ref(self, rows: Sequence[RowInfo] | None = None) -> BatchRef:
        """Some of its rows (default all) by reference."""
        chosen = self.rows if rows is None else rows
        return BatchRef(self.lease_id, self.fence, tuple(info.row for info in chosen))


@dataclass(frozen=True, slots=True)
class PutResult:
    """What a put did: groups stored now, and groups whose key was already known."""

    stored: int
    known: int


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What a commit did: rows done now, rows done before by this same lease, rows dropped since."""

    committed: int
    repeated: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """A prompt group no row of which is left; `serial` counts from 1."""

    serial: int
    group: GroupKey
    batch: int | None
    partition: str
    reason: str


@dataclass(frozen=True, slots=True)
class TaskStats:
    """One task's queue.

    Attributes:
        ready: rows that could be handed out now.
        leased: rows handed out and not yet committed.
        committed: rows committed since registration.
        expired: leases that ran out.
        holders: requester to rows it holds, for the wait-for graph.
    """

    ready: int = 0
    leased: int = 0
    committed: int = 0
    expired: int = 0
    holders: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What the store holds and has done.

    Attributes:
        rows: living rows. bytes: their payload. rows_by_partition: those of each partition.
        reserved_rows: credit taken. capacity_rows: credit there is.
        reserved_bytes: credit taken. capacity_bytes: credit there is.
        rows_put: rows ever put. rows_freed: rows every task committed or dropped.
        rows_dropped: cause to rows, by the reasons of `drop` without their details.
        dropped_groups: those with a serial above the one asked for, in order.
        waiting_puts: producers waiting for credit.
        tasks: name to its queue.
    """

    rows: int = 0
    bytes: int = 0
    rows_by_partition: dict[str, int] = field(default_factory=dict)
    reserved_rows: int = 0
    capacity_rows: int = 0
    reserved_bytes: int = 0
    capacity_bytes: int = 0
    rows_put: int = 0
    rows_freed: int = 0
    rows_dropped: dict[str, int] = field(default_factory=dict)
    dropped_groups: tuple[DroppedGroup, ...] = ()
    waiting_puts: int = 0
    tasks: dict[str, TaskStats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DataStoreCapabilities:
    """What a data store can do beyond the minimum.

    Attributes:
        remote: it serves other processes itself; otherwise core serves it over its own wire.
        durability: the modes it offers.
        lease_policies: policies by name.
        capacity_rows, capacity_bytes: what it holds; None where that is not known beforehand.
    """

    remote: bool = False
    durability: frozenset[str] = frozenset({"none"})
    lease_policies: frozenset[str] = LEASE_POLICIES
    capacity_rows: int | None = None
    capacity_bytes: int | None = None


@dataclass(slots=True)
class Registration:
    """A registered task; `aclose()` ends it and frees what it held. Idempotent."""

    task: TaskSpec
    _end: Callable[[], Awaitable[None]]
    _closed: bool = False

    async def aclose(self) -> None:
        """End the registration: its leases are void, rows no longer wait for it."""
        if not self._closed:
            self._closed = True
            await self._end()


class DataStore(Service):
    """The table. It owns rows, credit, leases; waiting is inside it, never by polling.

    Concurrency: every call may be cancelled; a cancelled call leaves the store usable, and a
    hand-out nobody received is given back when its lease expires.
    """

    API_VERSION: ClassVar[int] = 1

    @abstractmethod
    async def register(self, task: TaskSpec) -> Registration:
        """Announce a task; it sees rows put from now on.

        Registering an equal spec again joins the task (several workers share it); the task ends
        when the last of them closes.

        Raises:
            ConfigError: another spec under the same name, or a column with two writers.
        """

    @abstractmethod
    async def put(
        self,
        groups: Batch,
        *,
        keys: Sequence[GroupKey],
        samples: int = 1,
        batch: int | None = None,
        partition: str = "train",
        row_bytes: int = 0,
        wait_s: float | None = None,
    ) -> PutResult:
        """Store prompt groups: each becomes `samples` rows that share these columns.

        Idempotent by key: a known key, even one whose rows are freed, is counted and left alone.
        Waits for credit: `samples` rows and `samples * row_bytes` bytes a group.

        Args:
            groups: one row a group; its columns are stored once a group.
            keys: a key a group.
            samples: rows (trajectories) a group.
            batch: global batch the groups are admitted to; None for rows outside batches.
            partition: which tasks see the rows.
            row_bytes: the largest size one row may grow to; later commits never wait.
            wait_s: seconds to wait for credit; None waits without limit.

        Raises:
            DataError: a column does not follow the schema.
            BackpressureError: a group is larger than the whole store.
            ServiceTimeoutError: `wait_s` passed; nothing was stored of the groups not reported.
        """

    @abstractmethod
    async def lease(
        self,
        task: str,
        *,
        requester: str,
        version: int | None = None,
        limit_rows: int | None = None,
        limit_tokens: int | None = None,
        policy: str = "fifo",
        lease_s: float = 60.0,
        wait_s: float = 0.0,
    ) -> Lease | None:
        """Hand out ready rows; None if there were none for `wait_s` seconds.

        At least one row (one group, for a `whole_groups` task) is handed out when any is ready,
        even if it alone exceeds a limit. Each ready row is in exactly one lease of a task.

        Args:
            task: a registered task.
            requester: who asks.
            version: as the task's `order` reads it.
            limit_rows: most rows; None for all that are ready.
            limit_tokens: most tokens.
            policy: one of the capabilities' `lease_policies`.
            lease_s: life of the lease.
            wait_s: how long to wait for the first row.
        """

    @abstractmethod
    async def read(self, ref: BatchRef, columns: Sequence[str]) -> Batch:
        """The columns of leased rows, in the order of `ref.rows`.

        Raises:
            LeaseLostError: the lease ended.
            DataError: a column that the task does not read.
        """

    @abstractmethod
    async def renew(self, leases: Sequence[int], *, lease_s: float) -> tuple[int, ...]:
        """Let leases live `lease_s` from now; returns those that are lost already."""

    @abstractmethod
    async def commit(
        self,
        ref: BatchRef,
        *,
        writes: Batch | None = None,
        version: int | None = None,
    ) -> CommitResult:
        """Acknowledge leased rows and write their new columns, in one atomic, idempotent act.

        Args:
            ref: any part of a lease.
            writes: one row for each of `ref.rows`, with exactly the columns the task writes.
            version: the version that produced or trained the rows.

        Raises:
            LeaseLostError: the lease ended; nothing was written.
            DataError: `writes` does not follow the schema or the task's spec; nothing was written.
        """

    @abstractmethod
    async def release(self, ref: BatchRef) -> None:
        """Give leased rows back unprocessed; those of a lost lease are back already."""

    @abstractmethod
    async def drop(self, keys: Sequence[Key], *, reason: str) -> int:
        """Take rows out for every task; returns how many were there.

        Rows of a group that stay make a smaller group. A group with no row left is reported in
        `StoreStats.dropped_groups`.

        Args:
            keys: of the rows.
            reason: a cause, or `cause: details`; rows are counted by the cause alone, of which
                there should be few.
        """

    @abstractmethod
    async def stats(self, *, drops_after: int = 0, wait_s: float = 0.0) -> StoreStats:
        """Counters and queues.

        Args:
            drops_after: report dropped groups with a serial above this; `NO_DROPS`: none.
            wait_s: wait this long for such a group before answering.
        """


@runtime_checkable
class SupportsAttach(Protocol):
    """A store that serves other processes itself (capability `remote`)."""

    def attach_options(self) -> dict[str, Any]:
        """Options with which the same plugin, in another process, uses this open store."""


@runtime_checkable
class SupportsEviction(Protocol):
    """A store that takes rows back from the dead at once, not when their leases expire."""

    async def evict(self, requester: str) -> int:
        """A requester is gone for sure: its leases, of whatever task, are lost.

        Returns:
            How many rows it held; they go to others now.
        """
        ...


@runtime_checkable
class SupportsDurability(Protocol):
    """A store that outlives its processes."""

    async def checkpoint(self, version: int) -> None:
        """The model was saved at `version`: rows that trained it or an earlier one may be freed."""

    async def restore(self, version: int) -> int:
        """The model was loaded at `version`: what later versions did is void.

        Rows that later versions trained are to be trained again. Rows with a token of a later
        version are to be generated again, and what tasks of whole groups made of their groups is
        to be made again. Tasks that write nothing get every row again that is not trained. Rows
        outside batches are dropped. Called before anybody leases.

        Returns:
            How many rows are to be trained, that had been.

        Raises:
            DataError: a checkpoint of a later version was told, so rows are gone.
        """

    async def clear(self) -> None:
        """Forget every row and every key. Called before anybody else uses the store."""
        ...
