"""A table as records: what a shorter journal begins with. Pure; see `history.py`.

known [source, epoch, watermark, above], ...
drops rows_by_reason groups
segment number place
group key admission alive completed facts has done writers places trained
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from asyncflow_core.batch import GroupKey
from asyncflow_core.ledger import Admission, Group
from asyncflow_store_zmq import history
from asyncflow_store_zmq.places import NOWHERE, entry_of, place_of

if TYPE_CHECKING:
    from asyncflow_store_zmq.table import Table

__all__ = ["group_again", "records"]


def records(table: Table) -> Iterator[list[Any]]:
    """Everything that is not to be forgotten."""
    yield ["known", *table.ledger.known_keys().dump()]
    yield ["drops", *table.ledger.drop_log().dump()]
    for spec in table.tasks():
        yield history.task_record(spec)
    yield ["checkpoint", table.retained.version]
    for segment in table.payload.segments():
        yield ["segment", segment.number, table.payload.describe(segment)]
    for group in (*table.ledger.groups(), *table.retained.groups.values()):
        yield ["group", *_fields(table, group)]


def _fields(table: Table, group: Group) -> list[Any]:
    return [
        list(group.key),
        history.admission_fields(group.admission),
        group.alive,
        group.completed,
        list(group.facts),
        table.ledger.columns_of(group),
        {view.task.spec.name: view.done for view in group.views},
        *table.payload.places_of(group),
        dict(table.retained.versions.get(group.number, {})),
    ]


def group_again(table: Table, segments: dict[int, Any], fields: list[Any]) -> None:
    """A group as `records` said; `segments` by their old numbers."""
    key, admission, alive, completed, facts, has, done, writers, places, trained = fields
    tasks = {task.name: task for task in table.tasks()}
    columns, *rest = admission
    group = Group(
        0, GroupKey(*key), Admission(tuple(columns), *rest), tokens=0, oldest=None,
        has=table.ledger.presence(has), views=(),
    )  # fmt: skip
    group.facts = array("i", facts)
    group.completed = completed
    found = []
    for place in places:
        number, entry = entry_of(place)
        segment = segments.get(number) if place != NOWHERE else None
        if segment is None:
            found.append(NOWHERE)
        else:
            segment.refs += 1
            found.append(place_of(segment.number, entry))
    group.place = table.payload.place_again([tasks[name] for name in writers], found)
    group.alive = alive
    table.group_again(group, done, trained)
