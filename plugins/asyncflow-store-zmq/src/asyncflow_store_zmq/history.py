"""What a store remembers beyond its processes: records, and how a table is made of them. Pure.

A record is a plain list that begins with its kind:

    task name reads writes whole_groups partitions order batch_groups
    leave name
    put segment keys admission tokens oldest entries       entries: rows of the segment
    commit task keys segment tokens oldest entries version
    drop keys reason
    checkpoint version
    restore version
    known, drops, opened, segment, block                   a snapshot's, see `snapshot.py`

Rows are named by key, for numbers are of one life only. A segment is [shard, slot, units, start,
nbytes, rows, layout]. Numbers in bulk are little-endian bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncflow_core.batch import Key
from asyncflow_core.errors import DataError
from asyncflow_core.ledger import Admission, Claim
from asyncflow_core.services.data_store import Order, TaskSpec
from asyncflow_store_zmq import retold, snapshot

if TYPE_CHECKING:
    from asyncflow_store_zmq.incoming import Incoming
    from asyncflow_store_zmq.table import Table

__all__ = [
    "Replay",
    "admission_fields",
    "commit_record",
    "pack",
    "put_record",
    "task_record",
    "unpack",
]

_KINDS = frozenset((
    "shards", "task", "leave", "put", "commit", "drop", "checkpoint", "restore", "known", "drops",
    "opened", "segment", "block",
))  # fmt: skip
LOST = "lost with the memory of its shard"


def task_record(spec: TaskSpec) -> list[Any]:
    """A task was registered."""
    return [
        "task", spec.name, spec.reads, spec.writes, spec.whole_groups, spec.partitions,
        spec.order.value, spec.batch_groups,
    ]  # fmt: skip


def put_record(put: Incoming, segment: list[Any], stored: list[tuple[int, int]]) -> list[Any]:
    """Groups were stored: some runs of a segment's entries."""
    entries = np.concatenate([np.arange(first, last) for first, last in stored])
    return [
        "put", segment, pack(put.keys[entries]), admission_fields(put.admission),
        pack(np.asarray(put.tokens)[entries]), pack(np.asarray(put.oldest)[entries]),
        pack(entries),
    ]  # fmt: skip


def commit_record(
    claim: Claim,
    keys: Sequence[tuple[int, int, int, int]],
    segment: list[Any] | None,
    tokens: Sequence[int],
    oldest: Sequence[int],
    version: int | None,
) -> list[Any]:
    """A task is done with rows."""
    held = claim.held
    return [
        "commit", claim.task.name, pack(keys), segment,
        pack([tokens[p] for p in held] if tokens else []),
        pack([oldest[p] for p in held] if oldest else []),
        pack(held), version,
    ]  # fmt: skip


def admission_fields(admission: Admission) -> list[Any]:
    """As plain values."""
    return [
        list(admission.columns), admission.samples, admission.batch, admission.partition,
        admission.row_bytes,
    ]  # fmt: skip


def pack(numbers: Any) -> bytes:
    """Numbers in bulk."""
    return np.asarray(numbers, "<i8").tobytes()


def unpack(data: bytes) -> list[int]:
    """Inverse of `pack`."""
    found: list[int] = np.frombuffer(data, "<i8").tolist()
    return found


def _keys(data: bytes, parts: int) -> list[list[int]]:
    found: list[list[int]] = np.frombuffer(data, "<i8").reshape(-1, parts).tolist()
    return found


class Replay:
    """Makes a table what it was; memory of `lost` shards is gone.

    Rows that were put into lost memory are dropped, with a reason; what a task wrote there it has
    to write again.
    """

    def __init__(self, table: Table, lost: frozenset[int]) -> None:
        """For an empty table whose pool knows its shards."""
        self.table = table
        self._lost = lost
        self._gone: list[Key] = []
        self._segments: dict[int, Any] = {}  # of a snapshot

    def run(self, records: Iterable[list[Any]], tops: Sequence[int] = ()) -> None:
        """Take all records, in order; `tops` as in `ExtentPool.begin_replay`."""
        self.table.pool.begin_replay(tops)
        self.table.log = _ignore  # so that rows wait for checkpoints as they did
        for kind, *fields in records:
            if kind not in _KINDS:
                raise DataError(f"a record is of the unknown kind {kind!r:.40}")
            if kind != "shards":  # who reads the journal has looked at it
                getattr(self, f"_{kind}")(*fields)
        for segment in self._segments.values():
            self.table.payload.unref(segment, 0.0)
        self.table.drop(0.0, self._gone, LOST)
        self.table.pool.end_replay()

    def _task(
        self,
        name: str,
        reads: Any,
        writes: Any,
        whole: bool,
        partitions: Any,
        order: str,
        batch_groups: int,
    ) -> None:
        self.table.register(
            TaskSpec(
                name,
                tuple(reads),
                tuple(writes),
                whole,
                tuple(partitions),
                Order(order),
                batch_groups,
            )
        )

    def _leave(self, name: str) -> None:
        self.table.leave(name, 0.0)

    def _put(
        self, place: list[Any], keys: bytes, admission: list[Any], tokens: bytes, oldest: bytes,
        entries: bytes,
    ) -> None:  # fmt: skip
        columns, *rest = admission
        segment = self._segment_at(place)
        admitted = Admission(tuple(columns), *rest)
        retold.put_again(
            self.table,
            segment,
            np.frombuffer(keys, "<i8").reshape(-1, 3),
            admitted,
            array("i", unpack(tokens)),
            array("i", unpack(oldest)),
            unpack(entries),
        )
        if segment is None:
            groups = _keys(keys, 3)
            self._gone += [Key(a, b, c, s) for a, b, c in groups for s in range(admitted.samples)]
        else:
            self.table.payload.unref(segment, 0.0)

    def _commit(
        self, name: str, keys: bytes, place: list[Any] | None, tokens: bytes, oldest: bytes,
        entries: bytes, version: int | None,
    ) -> None:  # fmt: skip
        segment = None if place is None else self._segment_at(place)
        if place is not None and segment is None:
            return  # the task has to do it again
        rows, found = [], []
        for position, key in enumerate(map(Key._make, _keys(keys, 4))):
            row = self.table.ledger.find(key)
            if row is not None:
                rows.append(row)
                found.append(position)
        brought, ages, written = unpack(tokens), unpack(oldest), unpack(entries)
        retold.commit_again(
            self.table,
            name,
            rows,
            segment,
            [written[p] for p in found],
            [brought[p] for p in found] if brought else [],
            [ages[p] for p in found] if ages else [],
            version,
        )
        if segment is not None:
            self.table.payload.unref(segment, 0.0)

    def _drop(self, keys: list[list[int]], reason: str) -> None:
        self.table.drop(0.0, [Key(*key) for key in keys], reason)

    def _checkpoint(self, version: int) -> None:
        self.table.checkpoint(0.0, version)

    def _restore(self, version: int) -> None:
        self.table.restore(0.0, version)

    def _known(self, *dumped: Any) -> None:
        self.table.ledger.known_keys().load(dumped)

    def _drops(self, rows: dict[str, int], groups: Any) -> None:
        self.table.ledger.drop_log().load(rows, groups)

    def _opened(self, task: str, batches: bytes) -> None:
        self.table.ledger.open(task, unpack(batches))

    def _segment(self, number: int, place: list[Any]) -> None:
        segment = self._segment_at(place)
        if segment is not None:
            self._segments[number] = segment

    def _block(self, *fields: Any) -> None:
        snapshot.block_again(self.table, self._segments, list(fields))

    def _segment_at(self, place: list[Any]) -> Any:
        return None if place[0] in self._lost else self.table.payload.take_again(place)


def _ignore(_record: list[Any]) -> None:
    pass
