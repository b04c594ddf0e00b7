"""The ledger against a model that scans: any sequence of calls gives the same rows and numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncflow_core.batch import BatchRef, GroupKey, Key
from asyncflow_core.errors import DataError, LeaseLostError
from asyncflow_core.ledger import Admission, Ledger, row_number
from asyncflow_core.services.data_store import Order, TaskSpec

CAPACITY_ROWS = 14
CAPACITY_BYTES = 40
MAX_GAP_S = 10.0
BOTH = ("train", "eval")
SPECS = {
    spec.name: spec
    for spec in (
        TaskSpec("gen", ("prompt",), ("response",), partitions=BOTH, order=Order.ADMITTED),
        TaskSpec("score", ("response",), ("reward",), partitions=BOTH),
        TaskSpec("adv", ("reward",), ("advantage",), whole_groups=True),
        TaskSpec("train", ("response", "reward"), order=Order.STEP),
        TaskSpec("step", ("prompt", "advantage"), whole_groups=True, order=Order.STEP),
        TaskSpec("turn", ("response",), whole_groups=True, partitions=BOTH, batch_groups=2),
        TaskSpec("log", ("prompt",), partitions=("eval",), whole_groups=True),
    )
}
versions = st.integers(0, 4)
picks = st.lists(st.booleans(), min_size=1, max_size=8)


def chosen(items: list, flags: list[bool]) -> list:
    """Some of `items`, at least one."""
    return [x for i, x in enumerate(items) if flags[i % len(flags)]] or items[:1]


@dataclass(eq=False)
class ModelTask:
    spec: TaskSpec
    committed: int = 0
    expired: int = 0
    opened: set[int] = field(default_factory=set)  # batches of which it was handed something


@dataclass(eq=False)
class ModelRow:
    key: Key
    batch: int | None
    partition: str
    row_bytes: int
    columns: set[str]
    todo: list[ModelTask]  # tasks that still need it
    holder: dict[ModelTask, int] = field(default_factory=dict)  # task to lease


@dataclass(eq=False)
class ModelLease:
    task: ModelTask
    requester: str
    expires: float
    rows: dict[int, Key]  # row number to key, as handed out
    state: dict[Key, str]  # held, committed, dropped, back
    lost: bool = False


class Model:
    """The rules, obviously: dicts and scans, no queues, no masks, no counters."""

    def __init__(self, *, max_staleness: int, max_gap_s: float) -> None:
        self.max_staleness = max_staleness
        self.max_gap_s = max_gap_s
        self.now: float | None = None
        self.tasks: dict[str, ModelTask] = {}
        self.rows: dict[Key, ModelRow] = {}
        self.leases: dict[int, ModelLease] = {}
        self.known: set[GroupKey] = set()
        self.completed: set[GroupKey] = set()
        self.freed: list[Key] = []
        self.put_rows = 0
        self.drops: dict[str, int] = {}
        self.dropped_groups: list[GroupKey] = []

    def advance(self, now: float) -> None:
        live = [lease for lease in self.leases.values() if "held" in lease.state.values()]
        if self.now is not None and now - self.now > self.max_gap_s:
            for lease in live:
                lease.expires += now - self.now
        self.now = now
        for lease in live:
            if lease.expires <= now:
                lease.task.expired += 1
                self.lose(lease)

    def lose(self, lease: ModelLease) -> None:
        lease.lost = True
        self.give_back(lease, lease.state)

    def give_back(self, lease: ModelLease, keys) -> None:
        for key in list(keys):
            if lease.state[key] == "held":
                lease.state[key] = "back"
                del self.rows[key].holder[lease.task]

    def leave(self, name: str) -> None:
        task = self.tasks.pop(name)
        for lease in self.leases.values():
            if lease.task is task and "held" in lease.state.values():
                self.lose(lease)
        for row in list(self.rows.values()):
            if task in row.todo:
                row.todo.remove(task)
        self.free_done()

    def put(self, group: GroupKey, samples: int, batch, partition: str, row_bytes: int) -> None:
        self.known.add(group)
        self.put_rows += samples
        for sample in range(samples):
            todo = [t for t in self.tasks.values() if partition in t.spec.partitions]
            key = Key(*group, sample)
            self.rows[key] = ModelRow(key, batch, partition, row_bytes, {"prompt"}, todo)

    def ready(self, task: ModelTask) -> list[ModelRow]:
        todo = [row for row in self.rows.values() if task in row.todo]
        ready = [
            row for row in todo if set(task.spec.reads) <= row.columns and task not in row.holder
        ]
        if task.spec.whole_groups:
            waiting = {row.key.group for row in todo if row not in ready}
            ready = [row for row in ready if row.key.group not in waiting]
        return ready

    def open_batches(self) -> None:
        for task in self.tasks.values():
            groups = {(row.batch, row.key.group) for row in self.ready(task)}
            for batch in {row.batch for row in self.rows.values()} - {None}:
                whole = sum(found == batch for found, _ in groups)
                if task.spec.batch_groups and whole >= task.spec.batch_groups:
                    task.opened.add(batch)

    def allowed(self, task: ModelTask, version: int | None) -> list[ModelRow]:
        def may(row: ModelRow) -> bool:
            if task.spec.batch_groups and row.batch not in {None, *task.opened}:
                return False
            if task.spec.order is Order.STEP:
                return row.batch == version
            if task.spec.order is Order.ADMITTED:
                return row.batch is None or version >= row.batch - self.max_staleness
            return True

        return [row for row in self.ready(task) if may(row)]

    def commit(self, lease: ModelLease, keys: list[Key]) -> tuple[int, int, int]:
        states = [lease.state[key] for key in keys]
        for key, state in zip(keys, states, strict=True):
            if state == "held":
                lease.state[key] = "committed"
                row = self.rows[key]
                del row.holder[lease.task]
                row.todo.remove(lease.task)
                row.columns |= set(lease.task.spec.writes)
                lease.task.committed += 1
        self.free_done()
        return states.count("held"), states.count("committed"), states.count("dropped")

    def drop(self, keys: list[Key], reason: str) -> int:
        gone = [self.rows[key] for key in dict.fromkeys(keys) if key in self.rows]
        for row in gone:
            for lease_id in row.holder.values():
                self.leases[lease_id].state[row.key] = "dropped"
            self.free(row)
            self.drops[reason] = self.drops.get(reason, 0) + 1
        for group in dict.fromkeys(row.key.group for row in gone):
            left = any(key.group == group for key in self.rows)
            if not left and group not in self.completed:
                self.dropped_groups.append(group)
        return len(gone)

    def free_done(self) -> None:
        for row in list(self.rows.values()):
            if not row.todo:
                self.completed.add(row.key.group)
                self.free(row)

    def free(self, row: ModelRow) -> None:
        del self.rows[row.key]
        self.freed.append(row.key)


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        max_staleness=st.integers(0, 2), names=st.sets(st.sampled_from(sorted(SPECS)), min_size=3)
    )
    def start(self, max_staleness: int, names: set[str]) -> None:
        self.now = 0.0
        self.ledger = Ledger(
            capacity_rows=CAPACITY_ROWS,
            capacity_bytes=CAPACITY_BYTES,
            max_staleness=max_staleness,
            max_gap_s=MAX_GAP_S,
        )
        self.model = Model(max_staleness=max_staleness, max_gap_s=MAX_GAP_S)
        self.keys: dict[int, Key] = {}  # row number to key
        self.facts: dict[Key, int] = {}  # tokens, where there are any
        self.ready_before: dict[str, set[Key]] = {}
        self.last_fence = 0
        for name in sorted(names | {"gen"}):
            self.register(name)

    def lease_of(self, data) -> tuple[int, ModelLease]:
        lease_id = data.draw(st.sampled_from(sorted(self.model.leases)[-5:]))
        return lease_id, self.model.leases[lease_id]

    @rule(name=st.sampled_from(sorted(SPECS)))
    def register(self, name: str) -> None:
        if name not in self.model.tasks:
            self.ledger.register(SPECS[name])
            self.model.tasks[name] = ModelTask(SPECS[name])

    @precondition(lambda self: len(self.model.tasks) > 2)
    @rule(data=st.data())
    def leave(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.tasks)))
        self.ledger.leave(name)
        self.model.leave(name)

    @rule(
        sequence=st.integers(0, 30),
        samples=st.integers(1, 4),
        batch=st.none() | st.integers(0, 4),
        partition=st.sampled_from(BOTH),
        row_bytes=st.integers(0, 6),
    )
    def put(self, sequence: int, samples: int, batch, partition: str, row_bytes: int) -> None:
        group = GroupKey(0, 0, sequence)
        admission = Admission(("prompt",), samples, batch, partition, row_bytes)
        if group in self.model.known:
            assert self.ledger.known(group)
            assert self.ledger.put(group, admission) is None
            return
        seeing = [t for t in self.model.tasks.values() if partition in t.spec.partitions]
        nowhere = batch is None and any(t.spec.order is Order.STEP for t in seeing)
        if not seeing or nowhere:
            with pytest.raises(DataError):
                self.ledger.put(group, admission)
            return
        room = CAPACITY_ROWS - len(self.model.rows) >= samples
        size = sum(row.row_bytes for row in self.model.rows.values()) + samples * row_bytes
        assert self.ledger.fits(admission) == (room and size <= CAPACITY_BYTES)
        if self.ledger.fits(admission):
            number = self.ledger.put(group, admission)
            self.model.put(group, samples, batch, partition, row_bytes)
            for sample in range(samples):
                self.keys[row_number(number, sample)] = Key(*group, sample)

    @rule(
        first=st.integers(0, 30),
        count=st.integers(2, 4),
        samples=st.integers(1, 3),
        batch=st.integers(0, 4),
        partition=st.sampled_from(BOTH),
    )
    def put_together(self, first: int, count: int, samples: int, batch, partition: str) -> None:
        keys = [GroupKey(0, 0, first + number) for number in range(count)]
        admission = Admission(("prompt",), samples, batch, partition)
        seeing = [t for t in self.model.tasks.values() if partition in t.spec.partitions]
        room = CAPACITY_ROWS - len(self.model.rows)
        if not seeing or count * samples > room or self.model.known.intersection(keys):
            return
        assert self.ledger.room(admission) == room // samples
        numbers = range(count)
        block = self.ledger.intake(admission).put(keys[0], numbers, [-1] * count)
        for number, key in enumerate(keys):
            assert self.ledger.known(key)
            self.model.put(key, samples, batch, partition, 0)
            for sample in range(samples):
                row = row_number(block.number, number * samples + sample)
                self.keys[row] = Key(*key, sample)
                self.facts[self.keys[row]] = number

    @precondition(lambda self: self.model.tasks)
    @rule(
        data=st.data(),
        version=versions,
        limit=st.none() | st.integers(1, 6),
        lease_s=st.sampled_from([1.0, 3.0, 9.0, 30.0]),
        requester=st.sampled_from("ab"),
    )
    def lease(self, data, version: int, limit, lease_s: float, requester: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.tasks)))
        task = self.model.tasks[name]
        at = None if task.spec.order is Order.ANY else version
        lease = self.ledger.lease(
            self.now, name, requester=requester, version=at, limit_rows=limit, lease_s=lease_s
        )
        self.model.advance(self.now)
        allowed = {row.key: row for row in self.model.allowed(task, at)}
        if lease is None:
            assert not allowed, "ready rows were not handed out"
            return
        handed = [info.key for info in lease.rows]
        assert len(set(handed)) == len(handed)
        assert set(handed) <= set(allowed)
        assert lease.fence > self.last_fence
        self.last_fence = lease.fence
        self.check_limit(task.spec, limit, handed, allowed)
        self.check_order(task.spec, handed, allowed)
        for info in lease.rows:
            assert info.batch == allowed[info.key].batch
            assert self.keys[info.row] == info.key
            assert info.tokens == self.facts.get(info.key, 0)
            allowed[info.key].holder[task] = lease.lease_id
        rows = {info.row: info.key for info in lease.rows}
        self.model.leases[lease.lease_id] = ModelLease(
            task, requester, self.now + lease_s, rows, dict.fromkeys(handed, "held")
        )

    def check_limit(self, spec: TaskSpec, limit, handed: list[Key], allowed: dict) -> None:
        if limit is None:
            assert set(handed) == set(allowed)
        elif not spec.whole_groups:
            assert len(handed) == min(limit, len(allowed))
        else:
            groups = {key.group for key in handed}
            assert set(handed) == {key for key in allowed if key.group in groups}
            assert len(handed) <= limit or len(groups) == 1

    def check_order(self, spec: TaskSpec, handed: list[Key], allowed: dict) -> None:
        if spec.order is not Order.ADMITTED:
            return
        batches = [allowed[key].batch for key in handed]
        ranks = [-1 if batch is None else batch for batch in batches]
        assert ranks == sorted(ranks)
        left = [row.batch for key, row in allowed.items() if key not in set(handed)]
        assert all((-1 if batch is None else batch) >= ranks[-1] for batch in left)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), flags=picks, turned=st.booleans())
    def commit(self, data, flags: list[bool], turned: bool) -> None:
        lease_id, lease = self.lease_of(data)
        rows = chosen(list(lease.rows), flags)
        if turned:
            rows.reverse()
        keys = [lease.rows[row] for row in rows]
        ref = BatchRef(lease_id, lease_id, tuple(rows))
        self.model.advance(self.now)
        if any(lease.state[key] == "back" for key in keys):
            with pytest.raises(LeaseLostError):
                self.ledger.commit(self.now, ref)
            return
        claim = self.ledger.inspect(self.now, ref)
        assert [keys[i] for i in claim.held] == [k for k in keys if lease.state[k] == "held"]
        tokens = [row % 7 for row in rows]
        for key, brought in zip(keys, tokens, strict=True):
            if lease.state[key] == "held":
                self.facts[key] = self.facts.get(key, 0) + brought
        result = self.ledger.commit(self.now, ref, tokens=tokens)
        assert (result.committed, result.repeated, result.dropped) == self.model.commit(lease, keys)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), flags=picks)
    def release(self, data, flags: list[bool]) -> None:
        lease_id, lease = self.lease_of(data)
        rows = chosen(list(lease.rows), flags)
        self.model.advance(self.now)
        self.ledger.release(self.now, BatchRef(lease_id, lease_id, tuple(rows)))
        self.model.give_back(lease, [lease.rows[row] for row in rows])

    @rule(requester=st.sampled_from("abc"))
    def evict(self, requester: str) -> None:
        self.model.advance(self.now)
        lost = [lease for lease in self.model.leases.values() if lease.requester == requester]
        held = [list(lease.state.values()).count("held") for lease in lost]
        assert self.ledger.evict(self.now, requester) == sum(held)
        for lease, count in zip(lost, held, strict=True):
            if count:
                self.model.lose(lease)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), lease_s=st.sampled_from([0.5, 5.0, 30.0]))
    def renew(self, data, lease_s: float) -> None:
        lease_id, lease = self.lease_of(data)
        self.model.advance(self.now)
        lost = self.ledger.renew(self.now, [lease_id], lease_s=lease_s)
        assert lost == ((lease_id,) if lease.lost else ())
        if not lease.lost:
            lease.expires = max(lease.expires, self.now + lease_s)

    @rule(data=st.data(), flags=picks, reason=st.sampled_from(["late", "bad"]))
    def drop(self, data, flags: list[bool], reason: str) -> None:
        held = [key for key, row in self.model.rows.items() if row.holder]
        gone = [key for key in self.keys.values() if key not in self.model.rows][-2:]
        pool = data.draw(st.sampled_from([held, list(self.model.rows), gone]))
        if pool:
            keys = chosen(pool, flags)[:4]
            assert self.ledger.drop(keys, reason=reason) == self.model.drop(keys, reason)

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0, 10.0, 11.0, 500.0]), call=st.booleans())
    def pass_time(self, seconds: float, call: bool) -> None:
        self.now += seconds
        if call:
            self.ledger.advance(self.now)
            self.model.advance(self.now)

    @precondition(lambda self: self.ledger.next_deadline() is not None)
    @rule()
    def timer(self) -> None:
        self.now = max(self.now, self.ledger.next_deadline())
        self.ledger.advance(self.now)
        self.model.advance(self.now)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "model"):
            return
        model, stats = self.model, self.ledger.stats()
        model.open_batches()
        assert stats.rows == stats.reserved_rows == len(model.rows) <= CAPACITY_ROWS
        size = sum(row.row_bytes for row in model.rows.values())
        assert stats.reserved_bytes == size <= CAPACITY_BYTES
        assert stats.rows_put == model.put_rows
        assert stats.rows_freed == len(model.freed)
        assert stats.rows_dropped == model.drops
        assert [drop.group for drop in stats.dropped_groups] == model.dropped_groups
        assert [d.serial for d in stats.dropped_groups] == [
            i + 1 for i in range(len(model.dropped_groups))
        ]
        for name, task in model.tasks.items():
            numbers = stats.tasks[name]
            held = [r for r in model.rows.values() if task in r.holder]
            assert numbers.leased == len(held)
            assert numbers.ready == len(model.ready(task))
            assert (numbers.committed, numbers.expired) == (task.committed, task.expired)
            holders: dict[str, int] = {}
            for row in held:
                requester = model.leases[row.holder[task]].requester
                holders[requester] = holders.get(requester, 0) + 1
            assert numbers.holders == holders
        assert set(stats.tasks) == set(model.tasks)

    @invariant()
    def effects_name_what_happened(self) -> None:
        if not hasattr(self, "model"):
            return
        effects = self.ledger.take_effects()
        freed = [self.keys[row] for row in effects.freed]
        assert sorted(freed) == sorted(self.model.freed[len(self.model.freed) - len(freed) :])
        ready = {
            name: {row.key for row in self.model.ready(task)}
            for name, task in self.model.tasks.items()
        }
        for name, keys in ready.items():
            assert name in effects.ready or keys <= self.ready_before.get(name, set())
        self.ready_before = ready

    def teardown(self) -> None:
        if hasattr(self, "model"):
            for name in list(self.model.tasks):
                self.ledger.leave(name)
            stats = self.ledger.stats()
            assert (stats.rows, stats.reserved_rows, stats.reserved_bytes) == (0, 0, 0)


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestLedgerAgainstModel = LedgerMachine.TestCase
