"""A table as records: what a shorter journal begins with. Pure; see `history.py`.

known [source, epoch, starts, ends], ...
drops rows_by_reason groups
opened task batches
segment number place
block key admission alive kept completed facts has done writers places trained made tokens

Sets of rows are little-endian bytes, numbers in bulk too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from asyncflow_core.ledger import Admission, Block
from asyncflow_store_zmq import history, retold
from asyncflow_store_zmq.places import NOWHERE, entry_of, place_of

if TYPE_CHECKING:
    from asyncflow_store_zmq.table import Table

__all__ = ["block_again", "records"]


def records(table: Table) -> Iterator[list[Any]]:
    """Everything that is not to be forgotten."""
    yield ["known", *table.ledger.known_keys().dump()]
    yield ["drops", *table.ledger.drop_log().dump()]
    for spec in table.tasks():
        yield history.task_record(spec)
        if spec.batch_groups:
            yield ["opened", spec.name, history.pack(table.ledger.opened(spec.name))]
    yield ["checkpoint", table.retained.version]
    for segment in table.payload.segments():
        yield ["segment", segment.number, table.payload.describe(segment)]
    for block in table.ledger.blocks():
        yield ["block", *_fields(table, block)]
    for block, _ in table.retained.kept.values():
        if not block.alive:
            yield ["block", *_fields(table, block)]


def _fields(table: Table, block: Block) -> list[Any]:
    writers, places = table.payload.places_of(block)
    return [
        list(block.group_at(0)),
        history.admission_fields(block.admission),
        _pack(block.alive),
        _pack(table.retained.rows_of(block.number)),
        _pack(block.completed),
        history.pack(block.facts),
        {name: _pack(mask) for name, mask in table.ledger.columns_of(block).items()},
        {view.task.spec.name: _pack(view.done) for view in block.views},
        writers,
        history.pack(places),
        {
            version: _pack(mask)
            for version, mask in table.retained.trained.get(block.number, {}).items()
        },
        {
            version: _pack(mask)
            for version, mask in table.lineage.made.get(block.number, {}).items()
        },
        history.pack(table.lineage.tokens.get(block.number, ())),
    ]


def _pack(mask: int) -> bytes:
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def _unpack(masks: dict[Any, bytes]) -> dict[Any, int]:
    return {name: int.from_bytes(mask, "little") for name, mask in masks.items()}


def block_again(table: Table, segments: dict[int, Any], fields: list[Any]) -> None:
    """A block as `records` said; `segments` by their old numbers."""
    key, admission, *rows, facts, has, done, writers, places, trained, made, tokens = fields
    alive, kept, completed = (int.from_bytes(mask, "little") for mask in rows)
    tasks = {task.name: task for task in table.tasks()}
    columns, *rest = admission
    block = Block(
        0,
        (key[0], key[1]),
        key[2],
        Admission(tuple(columns), *rest),
        facts=array("i", history.unpack(facts)),
        has=table.ledger.presence(_unpack(has)),
        views=(),
    )
    block.completed = completed
    block.alive = 0
    shared, *own = history.unpack(places)
    groups = block.count_groups(alive | kept)
    found = [_again(segments, shared, groups), *(_again(segments, place, 1) for place in own)]
    block.place = table.payload.place_again([tasks[name] for name in writers], found)
    brought = array("i", history.unpack(tokens))
    retold.block_again(
        table, block, alive, kept, _unpack(done), _unpack(trained), _unpack(made), brought
    )


def _again(segments: dict[int, Any], place: int, entries: int) -> int:
    """A place by the new number of its segment, of which some entries are needed."""
    number, entry = entry_of(place)
    segment = segments.get(number) if place != NOWHERE else None
    if segment is None:
        return NOWHERE
    segment.refs += entries
    return place_of(segment.number, entry)
