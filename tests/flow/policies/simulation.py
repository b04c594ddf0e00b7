"""A run in virtual time: the real ledger, admission and policies; lengths and services are numbers.

Rollout slots lease a row at the version they serve, hold it as long as it takes, and commit it with
that version. The trainer leases, sorts, trains, completes a step. Nothing else moves.
"""

import heapq
import zlib
from collections import Counter
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from asyncflow_core.batch import GroupKey
from asyncflow_core.flow.running.admission import Admission
from asyncflow_core.flow.running.policies.dynamic_sampling import ALL_EQUAL, DynamicSampling
from asyncflow_core.flow.running.policies.fixed_batches import FixedBatches
from asyncflow_core.flow.running.policies.over_sampling import STRAGGLER, OverSampling
from asyncflow_core.flow.running.policies.ready_first import TOO_STALE, ReadyAdmission, ReadyFirst
from asyncflow_core.flow.running.policies.sorted_rows import staleness
from asyncflow_core.ledger import Admission as Put
from asyncflow_core.ledger import Ledger
from asyncflow_core.services.data_store import Order, TaskSpec

NORMAL = NormalDist()


def uniform(*parts):
    """In (0, 1), the same for the same parts."""
    return (zlib.crc32(repr(parts).encode()) + 0.5) / 2**32


@dataclass
class Settings:
    steps: int = 40
    groups_per_step: int = 4
    group_size: int = 4
    max_staleness: int = 1
    slots: int = 12
    replicas: int = 2
    sigma: float = 1.0  # of the lognormal lengths, whose median is 1
    train_s: float = 4.0  # a step
    lag_s: float = 0.5  # until a replica serves a new version, twice as long for the next one
    order: str = "batches"  # or ready_first:requeue, ready_first:drop, ready_first:mask
    dynamic: float = 0.0  # share of groups whose rewards are all equal
    extra_groups: int = 0
    seed: int = 0


@dataclass
class Outcome:
    lengths: list = field(default_factory=list)  # of trained rows
    staleness: list = field(default_factory=list)
    keys: Counter = field(default_factory=Counter)  # trained, each once
    prompts: Counter = field(default_factory=Counter)  # sequences trained
    steps: list = field(default_factory=list)  # trained groups a step
    dropped: Counter = field(default_factory=Counter)  # reason to rows
    masked: int = 0
    admitted: int = 0
    wall_s: float = 0.0


class Simulation:
    def __init__(self, settings):
        self.s = s = settings
        self.outcome = Outcome()
        over = OverSampling(
            groups_per_step=s.groups_per_step,
            extra_groups=s.extra_groups,
            group_size=s.group_size,
        )
        self.over = over if s.extra_groups else None
        name, _, too_stale = s.order.partition(":")
        kind = Admission if name == "batches" else ReadyAdmission
        self.admission = kind(
            groups_per_step=over.started, steps=s.steps, max_staleness=s.max_staleness
        )
        self.policy = (
            FixedBatches(s.max_staleness)
            if name == "batches"
            else ReadyFirst(s.max_staleness, too_stale)
        )
        self.requeue = too_stale == "requeue"
        self.dynamic = DynamicSampling() if s.dynamic else None
        self.ledger = Ledger(
            capacity_rows=1 << 20, capacity_bytes=1 << 40, max_staleness=s.max_staleness
        )
        self.ledger.register(TaskSpec("rollout", ("p",), ("r",), order=Order.ADMITTED))
        reads = ("r",)
        if self.dynamic:
            self.ledger.register(TaskSpec("filter", ("r",), ("kept",), True))
            reads = ("r", "kept")
        order = self.policy.lease_order
        self.ledger.register(TaskSpec("train", reads, (), True, ("train",), order))
        self.batches = {}
        self.sequence = self.again = self.serial = 0
        self.version = 0
        self.serving = [0] * s.replicas
        self.free = [[slot % s.replicas] for slot in range(s.slots)]
        self.held = []  # of the step under way: (info, lease)
        self.training = False
        self.events = []
        self.count = 0
        self.now = 0.0

    def at(self, when, call):
        self.count += 1
        heapq.heappush(self.events, (when, self.count, call))

    def run(self):
        self.move()
        while self.version < self.s.steps:
            assert self.events, "nobody can move"
            self.now, _, call = heapq.heappop(self.events)
            assert self.count < 1_000_000, "it never ends"
            call()
            self.move()
        self.outcome.wall_s = self.now
        return self.outcome

    def move(self):
        self.sift()
        self.replace_dropped()
        self.admit()
        self.roll_out()
        self.train()

    def admit(self):
        while (batch := self.admission.next()) is not None:
            self.put(batch, GroupKey(0, 0, self.sequence))
            self.sequence += 1

    def put(self, batch, key):
        assert batch <= self.version + self.s.max_staleness  # none is admitted early
        self.outcome.admitted += 1
        self.batches.setdefault(batch, []).append(key)
        self.ledger.put(key, Put(("p",), self.s.group_size, batch))

    def replace_dropped(self):
        for dropped in self.ledger.stats(drops_after=self.serial).dropped_groups:
            self.serial = dropped.serial
            self.batches[dropped.batch].remove(dropped.group)
            if dropped.reason == STRAGGLER:
                continue
            self.admission.replace(dropped.batch)
            if self.requeue and dropped.reason == TOO_STALE:  # the same prompt, by a new key
                self.again += 1
                self.put(self.admission.next(), GroupKey(1 + self.again, 0, dropped.group.sequence))

    def length(self, key):
        z = NORMAL.inv_cdf(uniform("length", self.s.seed, *key[1:]))
        return float(np.exp(self.s.sigma * z))

    def roll_out(self):
        idle = [slot for slot in self.free if slot]
        for slot in idle:
            [replica] = slot
            lease = self.ledger.lease(
                self.now,
                "rollout",
                requester=f"rollout-{replica}",
                version=self.serving[replica],
                limit_rows=1,
                lease_s=1e9,
            )
            if lease is not None:
                slot.clear()
                [info] = lease.rows
                done = self.now + self.length(info.key)
                self.at(done, self.finisher(slot, replica, lease, self.serving[replica]))

    def finisher(self, slot, replica, lease, version):
        def finish():
            slot.append(replica)
            self.ledger.commit(self.now, lease.ref(), oldest=[version])

        return finish

    def sift(self):
        if self.dynamic is None:
            return
        while lease := self.ledger.lease(self.now, "filter", requester="f", lease_s=1e9):
            groups = {}
            for info in lease.rows:
                groups.setdefault(info.key.group, []).append(info)
            for group, infos in groups.items():
                equal = uniform("equal", self.s.seed, *group[1:]) < self.s.dynamic
                rewards = [0.0] * len(infos) if equal else [0.0, *[1.0] * (len(infos) - 1)]
                if self.dynamic.keep(rewards, tokens=1):
                    self.ledger.commit(self.now, lease.ref(infos))
                else:
                    self.drop([info.key for info in infos], ALL_EQUAL)

    def drop(self, keys, reason):
        self.outcome.dropped[reason] += self.ledger.drop(keys, reason=reason)

    def train(self):
        if self.training:
            return
        s = self.s
        while (groups := s.groups_per_step - len(self.groups())) > 0:
            lease = self.ledger.lease(
                self.now,
                "train",
                requester="t",
                version=self.version,
                limit_rows=groups * s.group_size,
                lease_s=1e9,
            )
            if lease is None:
                return
            # Groups that lost rows are smaller, so that one more may have fitted the limit.
            surplus = set(list(dict.fromkeys(i.key.group for i in lease.rows))[groups:])
            back = [i for i in lease.rows if i.key.group in surplus]
            if back:
                self.ledger.release(self.now, lease.ref(back))
            rows = [i for i in lease.rows if i.key.group not in surplus]
            found = self.policy.sort(self.version, rows)
            self.held += [(rows[at], lease, True) for at in found.train]
            self.held += [(rows[at], lease, False) for at in found.mask]
            if found.drop:
                self.drop([rows[at].key for at in found.drop], found.reason)
                self.replace_dropped()
                self.admit()
                self.roll_out()
        self.training = True
        self.at(self.now + s.train_s, self.step)

    def groups(self):
        return {info.key.group for info, *_ in self.held}

    def step(self):
        out = self.outcome
        for info, lease, trained in self.held:
            self.ledger.commit(self.now, lease.ref([info]))
            if not trained:
                out.masked += 1
                continue
            out.lengths.append(self.length(info.key))
            out.staleness.append(staleness(self.version, info))
            out.keys[info.key] += 1
            out.prompts[info.key.sequence] += 1
        out.steps.append(self.groups())
        if self.over:
            late = self.over.stragglers(self.batches[self.version], self.groups())
            self.drop(late, STRAGGLER)
        self.held, self.training = [], False
        self.version += 1
        self.admission.advance(self.version)
        for replica in range(self.s.replicas):
            self.at(self.now + self.s.lag_s * (1 + replica), self.server(replica, self.version))

    def server(self, replica, version):
        def serve():
            self.serving[replica] = max(self.serving[replica], version)

        return serve


def simulate(**settings):
    return Simulation(Settings(**settings)).run()


def distance(lengths, sigma=1.0):
    """Kolmogorov-Smirnov distance of lengths from their lognormal distribution, 0 to 1."""
    values = np.sort(np.log(lengths) / sigma)
    expected = np.array([NORMAL.cdf(value) for value in values])
    steps = np.arange(len(values) + 1) / len(values)
    return float(max(np.max(steps[1:] - expected), np.max(expected - steps[:-1])))
