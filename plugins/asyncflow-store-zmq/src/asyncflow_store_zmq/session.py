"""What a client of the store does, without saying how calls are made.

Every method is a generator that yields `Call`s and is sent their results; its return value is the
method's. `store.py` drives it on an event loop, `blocking.py` without one.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import Batch, BatchRef, Column, GroupKey, Key
from asyncflow_core.errors import ConfigError, LeaseLostError
from asyncflow_core.schema import PER_TOKEN, validate
from asyncflow_core.services.data_store import (
    CommitResult,
    DroppedGroup,
    PutResult,
    StoreStats,
    TaskSpec,
    TaskStats,
)
from asyncflow_store_zmq.calls import MAX_DROPS
from asyncflow_store_zmq.handed import Handed
from asyncflow_store_zmq.layout import Layout, pack
from asyncflow_store_zmq.memory import (
    Call,
    FrameMemory,
    Lent,
    Memory,
    SharedMemory,
    Space,
    Steps,
    Wanted,
)
from asyncflow_store_zmq.packed import dump_keys, dump_lengths, dump_rows, load_rows
from asyncflow_store_zmq.payload import FACTS, SEGMENT, Bulk, lines_of

__all__ = ["Session", "seconds"]

_BY_RESPONSE = frozenset((*PER_TOKEN, "versions"))
_REMEMBERED_LEASES = 1024
_LONGEST_S = 1e9


def seconds(name: str, value: float) -> float:
    """How long to wait, or a lease to live, as the store takes it: from 0 to 30 years.

    Raises:
        ConfigError: it is not a number.
    """
    if math.isnan(value):
        raise ConfigError(f"{name} is a number of seconds, got {value}")
    return min(max(0.0, value), _LONGEST_S)


@dataclass(slots=True, eq=False)
class _Held:
    """A lease this client got: where its rows lie, as long as they are surely its own."""

    handed: Handed
    wanted: Wanted
    extra: frozenset[str]
    deadline: float
    gone: set[int] = field(default_factory=set)
    _positions: dict[int, int] = field(default_factory=dict)

    @property
    def rows(self) -> list[int]:
        """All of them, by number."""
        return self.handed.rows

    @property
    def positions(self) -> dict[int, int]:
        """Row to position."""
        if not self._positions:
            self._positions = {row: position for position, row in enumerate(self.rows)}
        return self._positions

    def surely_has(self, columns: Sequence[str]) -> bool:
        """Whether the lease surely lives, and where these columns lie is known."""
        if time.monotonic() >= self.deadline:
            return False
        known = {name for names, _ in self.wanted.sources for name in names} - self.extra
        return known.issuperset(columns)

    def holds(self, rows: Sequence[int]) -> bool:
        """Whether these rows are its own, as far as is known here."""
        if not self.gone and list(rows) == self.rows:
            return True
        return self.positions.keys() >= set(rows) and self.gone.isdisjoint(rows)


class _Names(Sequence[Key]):
    """Keys as errors name them, made only when one is named."""

    def __init__(self, rows: int, key: Callable[[int], Key]) -> None:
        self._rows, self._key = rows, key

    def __len__(self) -> int:
        return self._rows

    @overload
    def __getitem__(self, row: int) -> Key: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Key]: ...
    def __getitem__(self, row: int | slice) -> Key | Sequence[Key]:
        if isinstance(row, slice):
            return [self._key(position) for position in range(self._rows)[row]]
        return self._key(row)


def _key_of(row: int, held: _Held | None) -> Key:
    """Of a row of a lease; of one that is not known here, a stand-in with its number."""
    return Key(0, 0, row, 0) if held is None else held.handed.key(held.positions[row])


class Session:
    """One client's state: its memory, the extent it fills, the leases it holds."""

    def __init__(self, address: str) -> None:
        """The address decides how bytes travel; see `memory.py`."""
        self._local = address.startswith("ipc://")
        self._memory: Memory | None = None
        self._space = Space()
        self._layouts: dict[int, Layout] = {}
        self._leases: OrderedDict[int, _Held] = OrderedDict()
        self.shard_addresses: list[str] = []
        self.policies: frozenset[str] = frozenset()

    @property
    def local(self) -> bool:
        """Whether it shares memory with the shards."""
        return self._local

    def hello(self) -> Steps:
        """Learn where the memory is."""
        paths, self.shard_addresses, policies = yield Call("store.hello", [])
        self.policies = frozenset(policies)
        self._memory = SharedMemory(paths) if self._local else FrameMemory()

    def find_shards(self) -> Steps:
        """Learn of shards that were added."""
        _, self.shard_addresses, _ = yield Call("store.hello", [])

    def close(self) -> None:
        """Give the memory back."""
        if self._memory is not None:
            self._memory.close()
        self._leases.clear()

    def register(self, task: TaskSpec) -> Steps:
        """-> handle."""
        return (
            yield Call(
                "store.register",
                [
                    task.name, list(task.reads), list(task.writes), task.whole_groups,
                    list(task.partitions), task.order.value, task.batch_groups,
                ],
            )
        )  # fmt: skip

    def end(self, handle: str) -> Steps:
        """End a registration."""
        yield Call("store.end", [handle])

    def put(
        self,
        groups: Batch,
        keys: Sequence[GroupKey],
        samples: int,
        batch: int | None,
        partition: str,
        row_bytes: int,
        wait_s: float | None,
    ) -> Steps:
        """-> PutResult; see `DataStore.put`."""
        wait_s = None if wait_s is None else seconds("wait_s", wait_s)
        validate(groups, _Names(len(keys), lambda row: Key(*keys[row], 0)))
        rows = dump_keys(keys, 3)
        tokens, oldest = _facts(groups)
        written, lent = yield from self._write(groups)
        report = self._space.report()
        reply = None
        try:
            stored, known, reply = yield Call(
                "store.put",
                [
                    written, rows, tokens, oldest, samples, batch, partition, row_bytes, wait_s,
                    report,
                ],
                wait_s,
            )  # fmt: skip
        finally:
            lent.writing -= 1
            self._space.add(report, reply)
        return PutResult(stored, known)

    def _write(self, batch: Batch) -> Steps:
        """Copy a batch into the store's memory -> what to say of it, and the extent."""
        assert self._memory is not None
        packed = pack(batch)
        found = self._space.take(packed.nbytes)
        if found is None:
            wish = self._space.wish(packed.nbytes)
            reply = yield Call("store.lend", [wish, self._space.full()])
            found = self._space.take_from(reply, packed.nbytes)
        lent, start = found
        try:
            yield from self._memory.write(lent, start, packed)
        except BaseException:
            lent.writing -= 1
            raise
        place = [lent.shard, lent.slot, start, packed.nbytes, batch.rows, packed.layout.dump()]
        return place, lent

    # Leases

    def lease(
        self,
        task: str,
        requester: str,
        version: int | None,
        limit_rows: int | None,
        limit_tokens: int | None,
        policy: str,
        lease_s: float,
        wait_s: float,
    ) -> Steps:
        """-> Lease or None; see `DataStore.lease`."""
        lease_s, wait_s = seconds("lease_s", lease_s), seconds("wait_s", wait_s)
        asked = [task, requester, version, limit_rows, limit_tokens, policy, lease_s, wait_s]
        start = time.monotonic()
        reply = yield Call("store.lease", asked, wait_s)
        if reply is None:
            return None
        return (yield from self.receive(reply, asked, start)).lease

    def receive(self, reply: list[Any], asked: list[Any], start: float) -> Steps:
        """-> Handed: a hand-out, asked for at `start`; asks for layouts never seen."""
        lease_id, lines, sources, table, extra, whole, expires = reply
        matrix = lines_of(lines, sources)
        wanted = yield from self._wanted(matrix, sources, table)
        handed = Handed(lease_id, asked, matrix[:FACTS], whole=whole)
        # One machine, one clock; from elsewhere, counted from before the call was sent.
        deadline = expires if self._local else start + asked[6]
        self._leases[lease_id] = _Held(handed, wanted, frozenset(extra), deadline)
        while len(self._leases) > _REMEMBERED_LEASES:
            self._leases.popitem(last=False)
        return handed

    def _wanted(self, matrix: NDArray[np.int64], sources: list[list[str]], table: Bulk) -> Steps:
        data = table if isinstance(table, bytes) else table.data
        segments = {fields[0]: fields for fields in SEGMENT.iter_unpack(data)}
        for fields in segments.values():
            if fields[6] not in self._layouts:
                layout = yield Call("store.layout", [fields[6]])
                self._layouts[fields[6]] = Layout.load(layout)
        places = [(names, matrix[FACTS + number]) for number, names in enumerate(sources)]
        return Wanted(matrix.shape[1], places, segments)

    def read(self, ref: BatchRef, columns: Sequence[str]) -> Steps:
        """-> Batch; see `DataStore.read`. Without a message while the lease surely lives."""
        if not ref.rows:
            return Batch({}, rows=0)
        held = self._surely_held(ref, columns)
        if held is None:
            reply = yield Call("store.find", [*_ref(ref), list(columns), []])
            wanted = yield from self._wanted(lines_of(*reply[1:3]), *reply[2:4])
        else:
            wanted = _subset(held, ref)
        return (yield from self._copy_held(wanted, columns, lambda: ref))

    def read_handed(self, handed: Handed, columns: Sequence[str]) -> Steps:
        """-> Batch of all rows of a hand-out that has just come."""
        held = self._leases.get(handed.lease_id)
        if held is None or held.gone or not held.surely_has(columns):
            return (yield from self.read(handed.ref(), columns))
        return (yield from self._copy_held(held.wanted, columns, handed.ref))

    def _copy_held(
        self, wanted: Wanted, columns: Sequence[str], named: Callable[[], BatchRef]
    ) -> Steps:
        """Copy out; the store is told of what is not there though the lease lives."""
        try:
            return (yield from self._copy(wanted, columns))
        except LeaseLostError:
            ref = named()
            dropped = yield Call("store.missing", _ref(ref))
            if not dropped:
                raise
        raise LeaseLostError(
            f"{dropped} of {len(ref.rows)} rows of lease {ref.lease_id} were never written and are "
            f"dropped now; release the rest and lease again"
        )

    def _copy(self, wanted: Wanted, columns: Sequence[str]) -> Steps:
        assert self._memory is not None
        found = yield from self._memory.read(wanted, columns, self._layouts)
        return Batch({name: found[name] for name in columns}, rows=wanted.rows)

    def _surely_held(self, ref: BatchRef, columns: Sequence[str]) -> _Held | None:
        held = self._leases.get(ref.lease_id)
        if held is None or ref.fence != ref.lease_id or not held.surely_has(columns):
            return None
        return held if held.holds(ref.rows) else None

    def renew(self, leases: Sequence[int], lease_s: float) -> Steps:
        """-> lost leases."""
        lease_s = seconds("lease_s", lease_s)
        start = time.monotonic()
        lost = yield Call("store.renew", [list(leases), lease_s])
        for lease_id in set(leases) - set(lost):
            held = self._leases.get(lease_id)
            if held is not None:
                held.deadline = max(held.deadline, start + lease_s)
        for lease_id in lost:
            self._leases.pop(lease_id, None)
        return tuple(lost)

    def commit(self, ref: BatchRef, writes: Batch | None, version: int | None) -> Steps:
        """-> CommitResult; see `DataStore.commit`."""
        message, lent = yield from self.prepare(ref, writes, version)
        reply = None
        try:
            *counts, reply = yield Call("store.commit", message)
        finally:
            self.settle(message, lent, reply)
        return CommitResult(*counts)

    def prepare(self, ref: BatchRef, writes: Batch | None, version: int | None) -> Steps:
        """Write a commit's columns -> the message that makes them count, and their extent."""
        written = tokens = oldest = lent = None
        if writes is not None and len(writes):
            yield from self._check_writes(ref, writes)
            tokens, oldest = _facts(writes)
            written, lent = yield from self._write(writes)
        report = self._space.report() if written else [[], 0]
        return [*_ref(ref), written, tokens, oldest, version, report], lent

    def settle(self, message: list[Any], lent: Lent | None, reply: Any) -> None:
        """A commit was answered, or failed."""
        if lent is not None:
            lent.writing -= 1
        self._space.add(message[-1], reply)
        self._forget(message[0], load_rows(message[2]))

    def _check_writes(self, ref: BatchRef, writes: Batch) -> Steps:
        """By the schema; per-token columns by the rows' own responses."""
        response: Column | None = None
        held = self._leases.get(ref.lease_id)
        if ref.rows and "response_ids" not in writes and not writes.keys().isdisjoint(_BY_RESPONSE):
            response = yield from self._response(ref, held)
        if writes.rows != len(ref.rows):
            return  # the controller says so
        names = _Names(len(ref.rows), lambda row: _key_of(ref.rows[row], held))
        validate(writes, names, response=response)

    def _response(self, ref: BatchRef, held: _Held | None) -> Steps:
        """The responses of leased rows; None where they are not there (any more)."""
        if held is not None and held.holds(ref.rows):
            wanted = _subset(held, ref)
            if not any("response_ids" in names for names, _ in wanted.sources):
                return None
        else:
            try:
                reply = yield Call("store.find", [*_ref(ref), [], ["response_ids"]])
            except LeaseLostError:
                return None  # the commit finds out what it is
            wanted = yield from self._wanted(lines_of(*reply[1:3]), *reply[2:4])
        try:
            return (yield from self._copy(wanted, ["response_ids"]))["response_ids"]
        except LeaseLostError:
            return None

    def release(self, ref: BatchRef) -> Steps:
        """See `DataStore.release`."""
        yield Call("store.release", _ref(ref))
        self._forget(ref.lease_id, ref.rows)

    def _forget(self, lease_id: int, rows: Sequence[int]) -> None:
        held = self._leases.get(lease_id)
        if held is not None:
            held.gone.update(rows)

    def evict(self, requester: str) -> Steps:
        """-> rows it held."""
        return (yield Call("store.evict", [requester]))

    def drop(self, keys: Sequence[Key], reason: str) -> Steps:
        """-> rows dropped."""
        return (yield Call("store.drop", [dump_keys(keys, 4), reason]))

    def hurry(self, task: str, requester: str) -> Steps:
        """Hand-outs of this client that wait end at once."""
        yield Call("store.hurry", [task, requester])

    def notify(self, version: int, note: Any) -> Steps:
        """Announce weights."""
        yield Call("store.notify", [version, note])

    def weights(self, after: int, wait_s: float) -> Steps:
        """-> (version, note) of newer weights, or None."""
        wait_s = seconds("wait_s", wait_s)
        found = yield Call("store.weights", [after, wait_s], wait_s)
        return None if found is None else tuple(found)

    def checkpoint(self, version: int) -> Steps:
        """See `SupportsDurability`."""
        yield Call("store.checkpoint", [version])

    def restore(self, version: int) -> Steps:
        """-> rows given back; see `SupportsDurability`."""
        return (yield Call("store.restore", [version]))

    def stats(self, drops_after: int, wait_s: float) -> Steps:
        """-> StoreStats."""
        wait_s = seconds("wait_s", wait_s)
        plain = yield Call("store.stats", [drops_after, wait_s], wait_s)
        some = plain.pop("dropped_groups", ())
        dropped = [DroppedGroup(**fields) for fields in some]
        while len(some) == MAX_DROPS:  # there are more than a message takes
            more = yield Call("store.stats", [dropped[-1].serial, 0.0])
            some = more.pop("dropped_groups", ())
            dropped += [DroppedGroup(**fields) for fields in some]
        tasks = {name: TaskStats(**fields) for name, fields in plain.pop("tasks", {}).items()}
        return StoreStats(**plain, dropped_groups=tuple(dropped), tasks=tasks)


def _ref(ref: BatchRef) -> list[Any]:
    return [ref.lease_id, ref.fence, dump_rows(ref.rows)]


def _subset(held: _Held, ref: BatchRef) -> Wanted:
    """Where the rows of a reference lie, in its order."""
    whole = held.wanted
    if list(ref.rows) == held.rows:
        return whole
    positions = [held.positions[row] for row in ref.rows]
    sources = [(names, places[positions]) for names, places in whole.sources]
    return Wanted(len(positions), sources, whole.segments)


def _facts(batch: Batch) -> tuple[bytes, bytes]:
    """Tokens that each row brings, and the oldest version of its response (-1: none)."""
    tokens = dump_lengths(
        [batch[name].offsets for name in ("prompt_ids", "response_ids") if name in batch],
        batch.rows,
    )
    versions = batch.get("versions")
    if versions is None or versions.offsets is None or not len(versions.array):
        return tokens, b"\xff" * 4 * batch.rows
    oldest = np.full(batch.rows, -1, np.int32)
    some = versions.lengths > 0
    oldest[some] = np.minimum.reduceat(versions.array[:, 0], versions.offsets[:-1][some])
    return tokens, oldest.tobytes()
