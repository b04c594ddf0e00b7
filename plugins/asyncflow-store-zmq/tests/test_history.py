"""A table made of its records is the table: by any acts, at any moment, also from a snapshot."""

from __future__ import annotations

import os
from array import array
from collections import Counter

import msgpack
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncflow_core.batch import Batch, BatchRef, Column, GroupKey, Key
from asyncflow_core.ledger import Admission, positions_in
from asyncflow_core.services.data_store import Order, TaskSpec
from asyncflow_core.testing.data_store import GENERATE as KIT_GENERATE
from asyncflow_core.testing.data_store import prompts, responses, rewards
from asyncflow_store_zmq import snapshot
from asyncflow_store_zmq.history import Replay
from asyncflow_store_zmq.layout import pack
from asyncflow_store_zmq.payload import Written
from asyncflow_store_zmq.table import Table

GENERATE = TaskSpec("generate", ("prompt_ids",), KIT_GENERATE.writes, order=Order.ADMITTED)
SCORE = TaskSpec("score", ("response_ids",), ("reward",))
RANK = TaskSpec("rank", ("reward",), ("rank",), whole_groups=True, batch_groups=2)
TRAIN = TaskSpec("train", ("response_ids", "rank"), order=Order.STEP)
TASKS = (GENERATE, SCORE, RANK, TRAIN)


def ranks(count):
    return Batch({"rank": Column.dense(np.arange(count))})


def union(masks):
    found = 0
    for mask in masks:
        found |= mask
    return found


BROUGHT = {"generate": responses, "score": rewards, "rank": ranks}


def empty(shards=2):
    generations = Counter()

    def raise_generation(shard, slot):
        generations[shard, slot] += 1
        return generations[shard, slot]

    table = Table(
        capacity_rows=1000,
        capacity_bytes=0,
        max_staleness=0,
        max_gap_s=5.0,
        raise_generation=raise_generation,
    )
    for _ in range(shards):
        table.pool.add_shard()
    return table


def again(records, lost=frozenset()):
    table = empty()
    Replay(table, lost).run(msgpack.unpackb(msgpack.packb(list(records)), strict_map_key=False))
    return table


def state(table):
    """All that a client could see of each row, by name and not by number."""
    rows = {}
    for block in table.ledger.blocks():
        writers, places = table.payload.places_of(block)
        own = places[1:] or [-1] * block.rows * len(writers)
        for row in positions_in(block.alive):
            rows[block.key_at(row)] = (
                {n for n, mask in table.ledger.columns_of(block).items() if mask >> row & 1},
                (block.facts[row], block.facts[row - block.rows]),
                {
                    view.task.spec.name: (
                        view.done >> row & 1,
                        (view.offered | view.leased) >> row & 1,
                    )
                    for view in block.views
                },
                places[0] >= 0,
                {n: own[i * block.rows + row] >= 0 for i, n in enumerate(writers)},
            )
    kept = {
        block.key_at(row): version
        for block, mask in table.retained.kept.values()
        for version, trained in table.retained.trained[block.number].items()
        for row in positions_in(mask & trained)
    }
    made = {
        block.key_at(row): (version, table.lineage.tokens[block.number][row])
        for block in table.ledger.blocks()
        for version, rows_of in table.lineage.made.get(block.number, {}).items()
        for row in positions_in(rows_of & block.alive)
    }
    opened = {t.name: table.ledger.opened(t.name) for t in table.tasks() if t.batch_groups}
    return rows, kept, made, opened, table.ledger.stats().rows_dropped, table.pool.nbytes


class History(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table = empty()
        self.records = []
        self.table.log = self.records.append
        self.now = 0.0
        self.leases = []
        self.extent = None
        self.position = 0
        for task in TASKS:
            self.table.register(task)

    def write(self, batch):
        packed = pack(batch)
        if self.extent is None or self.position + packed.nbytes > self.extent.nbytes // 64:
            if self.extent is not None:
                self.table.pool.seal(self.extent)
            self.extent, self.position = self.table.pool.lend("me", packed.nbytes), 0
        start = self.extent.start + self.position
        self.position += packed.nbytes
        place = self.extent.shard, self.extent.slot, start, packed.nbytes
        return Written(*place, batch.rows, packed.layout.dump())

    @rule(first=st.integers(0, 30), count=st.integers(1, 4), samples=st.integers(1, 3))
    def put(self, first, count, samples):
        keys = [GroupKey(0, 0, first + i) for i in range(count)]
        admission = Admission(("prompt_ids", "answer"), samples, first % 3)
        self.store(keys, admission)

    @rule(sequences=st.lists(st.integers(0, 30), min_size=1, max_size=4))
    def put_in_any_order(self, sequences):
        keys = [GroupKey(0, 0, sequence) for sequence in sequences]
        self.store(keys, Admission(("prompt_ids", "answer"), 2, 1))

    def store(self, keys, admission):
        tokens, oldest = array("i", [1] * len(keys)), array("i", [-1] * len(keys))
        put = self.table.begin_put(
            "me", self.write(prompts(len(keys))), np.array(keys), admission, tokens, oldest
        )
        assert self.table.advance_put(put)
        self.table.end_put(put, self.now)

    @rule(task=st.sampled_from(TASKS), limit=st.integers(1, 5), version=st.integers(0, 2))
    def lease(self, task, limit, version):
        version = None if task.order is Order.ANY else version
        found = self.table.lease(self.now, task.name, "me", version=version, limit_rows=limit)
        if found is not None:
            self.leases.append((task, found.lease_id, found.rows[0].tolist()))

    @rule(data=st.data(), version=st.integers(1, 4))
    def commit(self, data, version):
        if not self.leases:
            return
        task, lease_id, rows = data.draw(st.sampled_from(self.leases))
        rows = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
        make = BROUGHT.get(task.name)
        written = None if make is None else self.write(make(len(rows)))
        brought = [3] * len(rows) if task is GENERATE else []
        ref = BatchRef(lease_id, lease_id, tuple(rows))
        self.table.commit(
            self.now,
            "me",
            ref,
            written,
            brought,
            [],
            version if task in (TRAIN, GENERATE) else None,
        )

    @rule(sequence=st.integers(0, 33), sample=st.integers(0, 2))
    def drop(self, sequence, sample):
        self.table.drop(self.now, [Key(0, 0, sequence, sample)], "bad")

    @rule(version=st.integers(0, 4))
    def checkpoint(self, version):
        self.table.checkpoint(self.now, version)

    @rule(version=st.integers(0, 4))
    def restore(self, version):
        for _, lease_id, rows in self.leases:  # before it, nobody leases
            self.table.release(self.now, BatchRef(lease_id, lease_id, tuple(rows)))
        self.leases.clear()
        version = max(version, self.table.retained.version)
        self.table.restore(self.now, version)
        for block in self.table.ledger.blocks():
            self.check_restored(block, version)

    def check_restored(self, block, version):
        """What later versions did is void, and all that followed from it."""
        trained = self.table.retained.trained.get(block.number, {})
        assert max(trained, default=0) <= version
        covered = union(trained.values())
        made = self.table.lineage.made.get(block.number, {})
        assert not union(rows for v, rows in made.items() if v > version) & ~covered & block.alive
        columns = {n: m & block.alive for n, m in self.table.ledger.columns_of(block).items()}
        without = block.alive & ~columns.get("response_ids", 0)
        assert not columns.get("reward", 0) & without
        assert not columns.get("rank", 0) & block.whole(without) & ~covered
        assert not block.view_of("train").done & block.alive & ~covered
        for row in positions_in(without):
            assert (block.facts[row], block.facts[row - block.rows]) == (1, -1)

    def teardown(self):
        """Once every row is gone and no checkpoint is waited for, no memory is held."""
        for table in (self.table, again(self.records)):
            for block in table.ledger.blocks():
                rows = positions_in(block.alive)
                table.drop(self.now, [block.key_at(row) for row in rows], "over")
            table.checkpoint(self.now, 100)
            assert table.pool.nbytes == 0
            assert not list(table.payload.segments())
            assert not table.retained.kept
            assert not table.lineage.made

    @rule()
    def shorten(self):
        self.records[:] = list(snapshot.records(self.table))

    @invariant()
    def records_make_the_same_table(self):
        assert state(again(self.records)) == state(self.table)

    @invariant()
    def a_snapshot_makes_the_same_table(self):
        assert state(again(snapshot.records(self.table))) == state(self.table)


History.TestCase.settings = settings(
    max_examples=int(os.environ.get("ASYNCFLOW_EXAMPLES", "25")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestHistory = History.TestCase


def test_batch_that_was_whole_once_gives_what_is_left_after_a_snapshot():
    history = History()
    table = history.table
    table.register(TaskSpec("turn", ("prompt_ids",), whole_groups=True, batch_groups=3))
    history.put(first=0, count=3, samples=1)
    table.drop(0.0, [Key(0, 0, 1, 0)], "bad")
    for after in (table, again(history.records), again(snapshot.records(table))):
        assert after.lease(0.0, "turn", "me").rows.shape[1] == 2


def test_replay_without_a_shards_memory_drops_its_rows_with_a_reason():
    history = History()
    history.put(first=0, count=2, samples=2)
    shard = history.extent.shard
    table = again(history.records, frozenset({shard}))
    stats = table.ledger.stats()
    assert stats.rows == 0
    assert stats.rows_dropped == {"lost with the memory of its shard": 4}
    assert [drop.group for drop in stats.dropped_groups] == [GroupKey(0, 0, 0), GroupKey(0, 0, 1)]


def test_replay_without_the_memory_of_a_commit_lets_its_task_do_it_again():
    history = History()
    history.put(first=0, count=2, samples=1)
    history.lease(task=GENERATE, limit=2, version=0)
    _task, lease_id, rows = history.leases[0]
    history.table.pool.seal(history.extent)
    put_shard, history.extent = history.extent.shard, None
    written = history.write(responses(2))
    ref = BatchRef(lease_id, lease_id, tuple(rows))
    history.table.commit(0.0, "me", ref, written, [3, 3], [], None)
    assert written.shard != put_shard
    table = again(history.records, frozenset({written.shard}))
    assert table.lease(0.0, "generate", "me", version=0).rows.shape[1] == 2
    assert table.lease(0.0, "score", "me") is None


def test_replay_of_a_commit_that_repeats_another_has_the_rows_where_each_was_written():
    history = History()
    history.put(first=0, count=3, samples=1)
    history.lease(task=GENERATE, limit=3, version=0)
    _task, lease_id, rows = history.leases[0]
    for done in (rows[1:2], rows):
        ref = BatchRef(lease_id, lease_id, tuple(done))
        written = history.write(responses(len(done)))
        history.table.commit(0.0, "me", ref, written, [3] * len(done), [], None)
    assert state(again(history.records)) == state(history.table)


def test_lease_of_rows_with_other_writers_finds_each_where_it_lies():
    history = History()
    table = history.table
    table.register(TaskSpec("log", ("answer",), partitions=("train", "eval")))
    table.register(TaskSpec("judge", ("prompt_ids",), ("verdict",), partitions=("eval",)))
    for sequence, partition in enumerate(("train", "eval", "train")):
        admission = Admission(("prompt_ids", "answer"), 1, 0, partition)
        written = history.write(prompts(1))
        keys, tokens, oldest = np.array([(0, 0, sequence)]), array("i", [1]), array("i", [-1])
        put = table.begin_put("me", written, keys, admission, tokens, oldest)
        table.advance_put(put)
        table.end_put(put, 0.0)
    found = table.lease(0.0, "log", "me")
    assert found.sources == [["answer"]]
    assert found.rows[1:4].T.tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2]]
    assert len(set(found.rows[8].tolist())) == len(found.segments) // 64 == 3
