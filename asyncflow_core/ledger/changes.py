"""The ledger's state and every change of a block; `store.py` has what shells call.

A change (a column written, a row back, dropped or freed) ends in `Task.settle` for each task that
sees the block; nothing else touches the queues.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from asyncflow_core.batch import GroupKey
from asyncflow_core.errors import ConfigError, DataError, InvariantError
from asyncflow_core.ledger.blocks import BLOCK_ROWS, Block, View
from asyncflow_core.ledger.credit import Credit
from asyncflow_core.ledger.drops import DropLog
from asyncflow_core.ledger.keys import KeyIndex, KnownKeys
from asyncflow_core.ledger.leases import LeaseBook, LeaseRecord
from asyncflow_core.ledger.masks import runs_in, span
from asyncflow_core.ledger.outcomes import Effects
from asyncflow_core.ledger.policies import (
    Budget,
    Candidate,
    Fifo,
    LeasePolicy,
    StalestFirst,
    TokenBalanced,
)
from asyncflow_core.ledger.registry import TaskTable
from asyncflow_core.ledger.rows import Admission
from asyncflow_core.ledger.tasks import Task

__all__ = ["Changes", "Intake"]


class Changes:
    """What a ledger holds, and how it changes."""

    def __init__(
        self,
        *,
        capacity_rows: int,
        capacity_bytes: int,
        max_staleness: int = 0,
        max_gap_s: float = 5.0,
        remember_rows: int = 65536,
        policies: Mapping[str, LeasePolicy] | None = None,
        first_lease: int = 0,
    ) -> None:
        """An empty store.

        Args:
            capacity_rows: credit in rows.
            capacity_bytes: credit in bytes.
            max_staleness: versions, bounds what `Order.ADMITTED` tasks get.
            max_gap_s: longest time between two calls that is not taken for a stopped process.
            remember_rows: rows of ended leases to remember (see `LeaseBook`).
            policies: lease policies beside "fifo", "stalest_first" and "token_balanced".
            first_lease: lease numbers begin above it: above those of an earlier life.
        """
        if max_staleness < 0:
            raise ConfigError(f"max_staleness counts versions from 0, got {max_staleness}")
        self.policies: dict[str, LeasePolicy] = {
            "fifo": Fifo(),
            "stalest_first": StalestFirst(),
            "token_balanced": TokenBalanced(),
            **(policies or {}),
        }
        self._credit = Credit(capacity_rows, capacity_bytes)
        self._max_gap_s = max_gap_s
        self._now: float | None = None
        self._tasks = TaskTable(max_staleness)
        self._leases = LeaseBook(remember_rows=remember_rows, first=first_lease)
        self._known = KnownKeys()
        self._blocks: dict[int, Block] = {}
        self._index = KeyIndex()
        self._last_block = 0
        self._rows_put = 0
        self._rows_freed = 0
        self._living: dict[str, int] = {}
        # Readers that keep up miss nothing: a store cannot drop more groups than it holds rows.
        self._drops = DropLog(length=max(1024, capacity_rows))
        self._effects = Effects()
        self._intakes: dict[Admission, Intake] = {}

    def _add(self, block: Block) -> None:
        """Take a block, whose views are in line with the queues."""
        self._blocks[block.number] = block
        self._index.add(block)
        self._count(block.admission, block.alive.bit_count())
        self._rows_put += block.alive.bit_count()

    def _count(self, admission: Admission, rows: int) -> None:
        """Rows live from now on, or, negative, live no more."""
        self._credit.take(admission, rows)
        self._living[admission.partition] = self._living.get(admission.partition, 0) + rows

    def _settle(self, block: Block, *, front: View | None = None) -> None:
        for view in block.views:
            if view.task.settle(block, view, front=view is front):
                self._effects.ready.add(view.task.spec.name)

    def _pick(
        self, task: Task, version: int | None, policy: LeasePolicy, budget: Budget, requester: str
    ) -> list[tuple[Block, View, int]]:
        """Take rows out of the queue until the budget is full; they are not yet leased."""
        picks: list[tuple[Block, View, int]] = []
        whole = task.spec.whole_groups
        if isinstance(policy, Fifo):  # it sees no window: rows go as they come
            while not budget.full and (block := task.queue.first(version)) is not None:
                view = block.view(task)
                mask = budget.take(block, view.offered, whole=whole)
                if mask:
                    task.take(block, view, mask)
                    picks.append((block, view, mask))
            return picks
        while not budget.full and (window := self._window(task, version, policy.window)):
            before = len(picks)
            try:
                order = _ordered(policy, window, requester, task)
            except Exception:  # of a plugin: no row is lost by it
                self._put_back(task, window)
                for block, view, _ in reversed(picks):
                    self._settle(block, front=view)
                raise
            for one in order:
                offered = one.mask & one.view.offered  # nothing, if it is named twice
                mask = budget.take(one.block, offered, whole=whole) if offered else 0
                if mask:
                    task.take(one.block, one.view, mask)
                    picks.append((one.block, one.view, mask))
            self._put_back(task, window)
            if len(picks) == before:  # the order left everything out
                break
        return picks

    def _put_back(self, task: Task, window: Sequence[Candidate]) -> None:
        """What was not taken keeps its place."""
        for one in reversed(window):
            if one.view.offered:
                task.queue.push(one.block, front=True)

    def _window(self, task: Task, version: int | None, most: int) -> list[Candidate]:
        """The first groups of a queue, whose blocks are out of it from now on."""
        window: list[Candidate] = []
        while len(window) < most and (block := task.queue.first(version)) is not None:
            task.queue.discard(block)
            view = block.view(task)
            masks = itertools.islice(block.groups_in(view.offered), most - len(window))
            window += [Candidate(block, view, mask) for mask in masks]
        return window

    def _unhold(self, lease: LeaseRecord, number: int, mask: int) -> tuple[Block, View]:
        """The lease no longer holds these rows; it ends with its last one."""
        part, block = lease.parts[number], self._blocks[number]
        view = block.view(lease.task)
        part.held &= ~mask
        view.let_go(lease, mask, last=not part.held)
        count = mask.bit_count()
        lease.task.hold(lease.requester, -count)
        lease.held -= count
        if not lease.held:
            self._leases.end(lease)
        return block, view

    def _give_back(self, lease: LeaseRecord, masks: Mapping[int, int]) -> None:
        for number, part in reversed(lease.parts.items()):  # so that the first comes out first
            mask = part.held & masks.get(number, 0)
            if mask:
                block, view = self._unhold(lease, number, mask)
                self._settle(block, front=view)

    def _lose(self, lease: LeaseRecord) -> None:
        lease.lost = True
        self._give_back(lease, {number: part.held for number, part in lease.parts.items()})

    def _learn(
        self,
        runs: Sequence[tuple[int, int, int]],
        masks: Mapping[int, int],
        tokens: Sequence[int],
        oldest: Sequence[int],
    ) -> None:
        """Take what columns add of those rows of some runs that are in `masks` by block."""
        position = 0
        for number, first, last in runs:
            mask = masks.get(number, 0) & span(first, last)
            for start, end in runs_in(mask):
                here = slice(position + start - first, position + end - first)
                self._blocks[number].learn(start, tokens[here], oldest[here])
            position += last - first

    def _complete(self, block: Block, view: View, mask: int) -> None:
        """Rows are done for a task: its columns are there, and what nobody needs is freed."""
        task = view.task
        view.done |= mask
        task.committed += mask.bit_count()
        for column in task.writes:
            block.has[column] |= mask
        self._free_done(block)
        if block.alive:  # else every task is done with it
            self._settle(block)

    def _drop_rows(self, block: Block, mask: int, reason: str) -> None:
        for view in block.views:
            for lease in list((view.leases or {}).values()):
                part = lease.parts[block.number]
                gone = part.held & mask
                if gone:
                    part.dropped |= gone
                    self._unhold(lease, block.number, gone)
        self._drops.add_rows(mask.bit_count(), reason)
        self._free(block, mask)
        self._settle(block)

    def _free_done(self, block: Block) -> None:
        done = block.done_by_all()
        if done:
            block.completed |= done
            self._free(block, done)

    def _free(self, block: Block, mask: int) -> None:
        """Take rows out of the store and give their credit back."""
        block.alive &= ~mask
        count = mask.bit_count()
        self._rows_freed += count
        self._count(block.admission, -count)
        self._effects.gone.append((block, mask))
        if not block.alive:
            del self._blocks[block.number]
            self._index.remove(block)


def _ordered(
    policy: LeasePolicy, window: Sequence[Candidate], requester: str, task: Task
) -> list[Candidate]:
    """Some of the candidates, in the policy's order; nothing it is given can be changed by it."""
    given, holders = tuple(window), MappingProxyType(task.holders)
    order = list(policy.order(given, requester=requester, holders=holders))
    known = set(map(id, given))
    for one in order:
        if id(one) not in known:
            raise InvariantError(
                f"the lease policy {type(policy).__name__} gave {one!r:.60} back, which is none of "
                f"its {len(given)} candidates; it puts them in order"
            )
    return order


class Intake:
    """Puts groups of one admission: what they have in common is looked up once."""

    def __init__(self, ledger: Changes, admission: Admission) -> None:
        """Of a checked admission; made by `Ledger.intake`."""
        self._ledger = ledger
        self._admission = admission
        self._given = ledger._tasks.given(admission)
        self._views = [
            (task, all(self._given[column] for column in task.reads))
            for task in ledger._tasks.seeing(admission.partition)
        ]
        self._ready = [task.spec.name for task, ready in self._views if ready]
        self.most = max(1, BLOCK_ROWS // admission.samples)

    def put(
        self, key: GroupKey, tokens: Sequence[int], oldest: Sequence[int], place: Any = None
    ) -> Block:
        """Store groups that are not known and fit, with sequences from a key's on.

        Args:
            key: of the first group; the others have the sequences after it.
            tokens: of each row, by the group; as many as there are groups, at most `most`.
            oldest: version of each group's responses, -1 where there is none.
            place: of their payload, as the shell counts.
        """
        if min(key) < 0:
            raise DataError(f"group key {tuple(key)} has a negative part; count from 0")
        ledger, admission = self._ledger, self._admission
        samples = admission.samples
        facts = array("i", tokens) + array("i", oldest)
        if samples > 1:
            facts = array("i", [fact for fact in facts for _ in range(samples)])
        full = (1 << (len(facts) >> 1)) - 1
        ledger._last_block += 1
        views = tuple([View(task) for task, _ in self._views])
        block = Block(
            ledger._last_block,
            ledger._known.add(key, len(tokens)),
            key.sequence,
            admission,
            facts=facts,
            has=[full if given else 0 for given in self._given],
            views=views,
        )
        block.place = place
        ledger._add(block)
        ledger._effects.ready.update(self._ready)
        for view, (task, ready) in zip(views, self._views, strict=True):
            if ready:
                task.offer_new(block, view)
        return block
