"""The weight protocol under faults at every transition, with a clock of its own."""

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from asyncflow_core.config import WeightSyncConfig
from asyncflow_core.errors import EngineError, InvariantError
from asyncflow_core.flow.weights.instructions import Commit, Compare, Fail, Retire, Stage
from asyncflow_core.flow.weights.protocol import WeightProtocol
from asyncflow_core.flow.weights.switching import Switching
from asyncflow_core.services.rollout import SwitchMode

STAGE_S, COMMIT_S, ATTEMPTS, COMPARE_EVERY = 10.0, 5.0, 2, 3
NAMES = ("r0", "r1", "r2")
names = st.sampled_from(NAMES)


class Replicas(RuleBasedStateMachine):
    """What replicas and trainer really do, as the protocol cannot see it, and what it must hold."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.protocol = WeightProtocol(STAGE_S, COMMIT_S, ATTEMPTS, COMPARE_EVERY)
        self.newest = None  # number of the newest weights
        self.names = []  # (life, version) of each number
        self.retired = []
        self.asked = {}  # replica to the one instruction it works on
        self.deadline = {}
        self.late = []  # instructions of replicas that are gone or failed, still to be answered
        self.serves = {}  # replica to the versions it served since it came up
        self.confirmed = {}  # replica to versions whose checksum it reported rightly
        self.failed = {}
        self.tries = {}
        self.withdrawn = False  # the newest makes room for the next
        self.void = set()  # numbers of those that came only in part, when the next began
        self.comes = None  # number of the weights that are not all there
        self.holds = {}  # replica to whether what it staged of them is right
        self.early = set()  # replicas that were asked for them

    def take(self, instructions):
        """Check each instruction and let it happen."""
        for found in instructions:
            match found:
                case Stage(replica, _, _, life):
                    version = self.number(found.version, life)
                    assert replica in self.serves
                    assert replica not in self.asked
                    assert replica not in self.failed
                    assert version == self.newest
                    assert not self.withdrawn
                    assert version not in self.retired
                    served = self.serves[replica]
                    assert not served or version > served[-1]
                    self.tries[replica, version] = self.tries.get((replica, version), 0) + 1
                    assert self.tries[replica, version] <= ATTEMPTS
                    if version == self.comes:
                        assert replica not in self.early
                        self.early.add(replica)
                    self.ask(replica, found, STAGE_S)
                case Commit(replica, _, _, life):
                    assert replica not in self.asked
                    assert self.number(found.version, life) != self.comes
                    assert self.number(found.version, life) in self.confirmed[replica]
                    self.ask(replica, found, COMMIT_S)
                case Compare(replica, _, _, life):
                    version = self.number(found.version, life)
                    assert replica not in self.asked
                    assert self.serves[replica][-1] == version
                    assert found.version % COMPARE_EVERY == 0
                    assert version not in self.retired
                    self.ask(replica, found, STAGE_S)
                case Retire():
                    version = self.number(found.version, found.life)
                    assert version != self.newest or self.withdrawn
                    assert version not in self.retired
                    assert version not in self.fetched()
                    self.retired.append(version)
                case Fail(replica, version, reason, decided):
                    assert reason
                    assert decided == ("bit" in reason)
                    assert replica not in self.asked
                    final = "deadline" in reason or "bit" in reason
                    tried = max(
                        (
                            n
                            for (who, number), n in self.tries.items()
                            if who == replica and self.names[number][1] == version
                        ),
                        default=0,
                    )
                    assert final or tried == ATTEMPTS
                    self.failed[replica] = version

    def ask(self, replica, instruction, limit_s):
        self.asked[replica] = instruction
        self.deadline[replica] = self.now + limit_s

    def fetched(self):
        """Weights whose bytes a replica needs; one that commits holds them already."""
        return {
            self.number(a.version, a.life)
            for a in self.asked.values()
            if not isinstance(a, Commit) or a.version % COMPARE_EVERY == 0
        }

    def number(self, version, life):
        return self.names.index((life, version))

    def answered(self, replica):
        return self.asked.pop(replica)

    def free(self):
        return sorted(self.asked)

    @initialize(count=st.integers(1, 3))
    def start(self, count):
        for name in NAMES[:count]:
            self.join(name)

    @rule(back=st.sampled_from([None, None, None, 1, 2]), whole=st.booleans())
    def publish(self, back, whole):
        """The next version, or that of a new life, which goes on from an earlier one."""
        if self.comes is not None:  # the rest of it never came
            for name, asked in self.asked.items():
                if isinstance(asked, Stage) and self.stages_what_comes(asked):
                    self.deadline[name] = self.now + STAGE_S
            self.void.add(self.comes)
            self.comes, self.holds, self.early = None, {}, set()
        life, version = self.names[-1] if self.names else (0, -1)
        version = version + 1
        if back is not None and self.names:
            life, version = life + 1, max(0, version - back)
        self.names.append((life, version))
        self.withdrawn = False
        self.newest = len(self.names) - 1
        if whole:
            self.take(self.protocol.published(version, f"sum {self.newest}", self.now, life=life))
        else:
            self.comes = self.newest
            self.take(self.protocol.coming(version, self.now, life=life))

    @precondition(lambda self: self.comes is not None)
    @rule()
    def publish_the_rest(self):
        """What comes is there; only now its checksum is known."""
        number, self.comes = self.comes, None
        life, version = self.names[number]
        for name, asked in self.asked.items():
            if isinstance(asked, Stage) and self.number(asked.version, asked.life) == number:
                self.deadline[name] = self.now + STAGE_S
        held, self.holds, self.early = self.holds, {}, set()
        found = self.protocol.published(version, f"sum {number}", self.now, life=life)
        committed = {i.replica for i in found if isinstance(i, Commit)}
        assert committed == {name for name, right in held.items() if right}
        self.take(found)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def publish_again(self, data):
        """Told twice, or late: nobody is asked for anything."""
        number = data.draw(st.integers(0, self.newest))
        life, version = self.names[number]
        assert self.protocol.coming(version, self.now, life=life) == []
        if number == self.comes or (number in self.void and number not in self.retired):
            return
        found = self.protocol.published(version, f"sum {number}", self.now, life=life)
        assert found == ([Retire(version, life)] if number in self.retired else [])

    @precondition(lambda self: self.names and self.comes is None)
    @rule()
    def withdraw(self):
        self.withdrawn = True
        found = self.protocol.withdraw()
        assert all(isinstance(i, Retire) for i in found)
        self.take(found)

    @precondition(lambda self: self.names and self.comes is None and not self.withdrawn)
    @rule()
    def publish_other_weights_as_the_same_version(self):
        life, version = self.names[-1]
        before = repr(self.protocol)
        with pytest.raises(InvariantError, match="published twice"):
            self.protocol.published(version, "sum of another", self.now, life=life)
        assert repr(self.protocol) == before

    @rule(name=names)
    def join(self, name):
        """A replica comes up, or died and comes back before anybody noticed."""
        self.gone(name)
        self.serves[name], self.confirmed[name] = [], set()
        self.take(self.protocol.join(name, self.now))

    @rule(name=names)
    def leave(self, name):
        self.gone(name)
        self.take(self.protocol.leave(name))

    def gone(self, name):
        if name in self.asked:
            self.late.append(self.answered(name))
        for store in (self.serves, self.confirmed, self.failed, self.holds):
            store.pop(name, None)
        self.early.discard(name)
        self.tries = {key: n for key, n in self.tries.items() if key[0] != name}

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), how=st.sampled_from(["right", "right", "wrong", "error"]))
    def answer(self, data, how):
        replica = data.draw(st.sampled_from(self.free()))
        asked = self.answered(replica)
        number = self.number(asked.version, asked.life)
        if how == "error" and not isinstance(asked, Compare):
            if isinstance(asked, Stage) and number in {self.comes, *self.void}:
                self.tries[replica, number] -= 1
            self.take(self.protocol.failed(replica, asked.call, "engine says no", self.now))
        elif isinstance(asked, Compare):
            difference = "" if how == "right" else "a bit differs"
            self.take(self.protocol.compared(replica, asked.call, difference, self.now))
        elif isinstance(asked, Commit):
            self.serves[replica].append(number)
            self.take(self.protocol.committed(replica, asked.call, self.now))
        else:
            checksum = f"sum {number}" if how == "right" else "sum of noise"
            if how == "right":
                self.confirmed[replica].add(number)
            found = self.protocol.staged(replica, asked.call, checksum, self.now)
            if number == self.comes:
                self.holds[replica] = how == "right"
                self.late.append(asked)
                assert found == []
            self.take(found)

    @precondition(lambda self: self.late)
    @rule(data=st.data(), how=st.sampled_from(["staged", "failed", "committed", "compared"]))
    def answer_late(self, data, how):
        """A report of a call that is over, whatever it says, changes nothing."""
        asked = data.draw(st.sampled_from(self.late))
        before = repr(self.protocol)
        report = {
            "staged": lambda: self.protocol.staged(
                asked.replica, asked.call, f"sum {asked.version}", self.now
            ),
            "failed": lambda: self.protocol.failed(asked.replica, asked.call, "late", self.now),
            "committed": lambda: self.protocol.committed(asked.replica, asked.call, self.now),
            "compared": lambda: self.protocol.compared(asked.replica, asked.call, "bit", self.now),
        }[how]
        assert report() == []
        assert repr(self.protocol) == before

    @rule(seconds=st.floats(0.1, 8.0))
    def pass_time(self, seconds):
        self.now += seconds
        due = {name for name, deadline in self.deadline.items() if name in self.asked}
        due = {name for name in due if self.deadline[name] <= self.now}
        due = {name for name in due if not self.stages_what_comes(self.asked[name])}
        self.late += [self.answered(name) for name in due]
        self.take(self.protocol.tick(self.now))
        assert due <= self.failed.keys()

    def stages_what_comes(self, asked):
        return self.number(asked.version, asked.life) == self.comes

    @invariant()
    def served_versions_are_confirmed_and_increase(self):
        for name, versions in self.serves.items():
            assert versions == sorted(set(versions))
            assert set(versions) <= self.confirmed[name]
            serving = self.names[versions[-1]][1] if versions else None
            assert self.protocol.serving(name) == serving

    @invariant()
    def nobody_waits_for_another(self):
        """A replica that is free, sound and behind has been asked for the newest version."""
        for name, versions in self.serves.items():
            tried = self.comes is not None and name in self.early
            free = name not in self.asked and name not in self.failed and not tried
            if self.withdrawn:  # it gets the next one
                continue
            if free and self.newest is not None:
                assert versions
                assert versions[-1] == self.newest

    @invariant()
    def old_versions_that_nobody_fetches_are_retired(self):
        wanted = self.fetched() | (set() if self.withdrawn else {self.newest})
        everything = set(range(0 if self.newest is None else self.newest + 1))
        assert set(self.retired) == everything - wanted, "old weights nobody needs"
        assert len(self.retired) == len(set(self.retired))

    @invariant()
    def settled_and_waiting_say_what_is(self):
        settled = all(v and v[-1] == self.newest for v in self.serves.values())
        done = settled and not self.asked and not self.failed
        if self.newest is not None:
            assert self.protocol.settled() == done
        lines = self.protocol.waiting(self.now)
        late = set()
        if self.withdrawn:
            free = self.serves.keys() - self.asked.keys() - self.failed.keys()
            late = {name for name in free if self.serves[name][-1:] != [self.newest]}
        assert len(lines) == len(self.asked) + len(self.holds) + len(late)
        for name in late:
            assert f"{name} waits for the next version: the transport holds one" in lines
        for name in self.holds:
            version = self.names[self.comes][1]
            assert f"{name} is done with version {version}, which still comes" in lines
        for name, asked in self.asked.items():
            phase = {Stage: "staging", Commit: "committing", Compare: "comparing"}[type(asked)]
            left = f"{self.deadline[name] - self.now:.0f} s left"
            if self.stages_what_comes(asked):
                left = "which still comes"
            assert f"{name} is {phase} version {asked.version}, {left}" in lines


Replicas.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_weight_protocol_any_faults_holds = Replicas.TestCase


def test_failed_stage_keeps_old_version_is_retried_then_fails():
    protocol = WeightProtocol(attempts=2)
    (stage,) = [*protocol.join("r", 0), *protocol.published(0, "a", 0)]
    (commit,) = protocol.staged("r", stage.call, "a", 0)
    assert protocol.committed("r", commit.call, 0) == []
    (stage,) = protocol.published(1, "b", 1)[:1]
    again, *_ = protocol.staged("r", stage.call, "broken", 2)
    assert isinstance(again, Stage)
    assert protocol.serving("r") == 0
    (fail,) = protocol.failed("r", again.call, "out of memory", 3)
    assert fail == Fail("r", 1, "out of memory")
    assert protocol.serving("r") == 0
    assert protocol.published(2, "c", 4) == [Retire(1)]  # a failed replica is left alone


def test_failed_replica_that_comes_back_catches_up_with_the_newest():
    protocol = WeightProtocol(attempts=1)
    protocol.join("r", 0)
    (stage,) = protocol.published(0, "a", 0)
    (fail,) = protocol.failed("r", stage.call, "died", 0)
    assert fail == Fail("r", 0, "died")
    protocol.published(1, "b", 1)
    (stage,) = protocol.join("r", 2)
    assert (stage.replica, stage.version) == ("r", 1)
    (commit,) = protocol.staged("r", stage.call, "b", 3)
    protocol.committed("r", commit.call, 4)
    assert protocol.serving("r") == 1
    assert protocol.settled()


def test_slow_replica_holds_up_nobody_and_skips_versions():
    protocol = WeightProtocol()
    slow, fast = (protocol.join(name, 0) for name in ("slow", "fast"))
    assert slow == fast == []
    slow, fast = protocol.published(0, "0", 0)
    for version in range(1, 4):
        commit = protocol.staged("fast", fast.call, str(version - 1), 0)[0]
        protocol.committed("fast", commit.call, 0)
        (fast,) = [i for i in protocol.published(version, str(version), 0) if isinstance(i, Stage)]
        assert fast.replica == "fast"
    commit, retired = protocol.staged("slow", slow.call, "0", 0)  # held until it was fetched
    found = protocol.committed("slow", commit.call, 0)
    assert retired == Retire(0)
    assert [i.version for i in found if isinstance(i, Stage)] == [3]


def test_coming_version_is_staged_at_once_and_committed_when_it_is_whole():
    protocol = WeightProtocol(attempts=2)
    right, broken, failing = [
        *(protocol.join("right", 0) or protocol.join("broken", 0) or protocol.join("failing", 0)),
        *protocol.coming(0, 0),
    ]
    assert [s.replica for s in (right, broken, failing)] == ["right", "broken", "failing"]
    assert protocol.staged("right", right.call, "a", 1) == []
    assert protocol.staged("broken", broken.call, "noise", 1) == []
    assert protocol.failed("failing", failing.call, "the publisher gave up", 1) == []
    assert protocol.tick(1e9) == []  # they wait for the trainer
    commit, *again = protocol.published(0, "a", 1e9)
    assert (type(commit), commit.replica) == (Commit, "right")
    assert [(type(i), i.replica) for i in again] == [(Stage, "broken"), (Stage, "failing")]
    fails = [protocol.failed(i.replica, i.call, "again", 1e9)[0] for i in again]
    assert fails[0] == Fail("broken", 0, "again")
    assert (type(fails[1]), fails[1].replica) == (Stage, "failing")  # that it came did not count


async def test_export_that_fails_before_it_begins_is_told_at_once():
    class Trainer:
        async def publish(self, version, life):
            raise EngineError("out of memory")

        async def coming(self, version, life):
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        switching = Switching({}, Trainer(), SwitchMode.DRAIN, group, WeightSyncConfig(plugin="x"))
        with pytest.raises(EngineError, match="out of memory"):
            await asyncio.wait_for(switching.publish(1, 0, overlaps=True), 20)


def test_version_that_never_came_whole_holds_up_nobody():
    protocol = WeightProtocol(attempts=1)
    done, slow = [
        *(protocol.join("done", 0) or protocol.join("slow", 0)),
        *protocol.coming(5, 0),
    ]
    assert protocol.staged("done", done.call, "a", 0) == []
    (again,) = protocol.published(3, "b", 1, life=1)  # another trainer's
    assert (again.replica, again.version, again.life) == ("done", 3, 1)
    again, retired = protocol.failed("slow", slow.call, "its publisher ended", 2)
    assert (again.replica, again.version, again.life) == ("slow", 3, 1)
    assert retired == Retire(5)  # nobody keeps what never came


def test_version_withdrawn_is_retired_when_those_that_were_asked_have_it():
    protocol = WeightProtocol()
    fast, slow = [*(protocol.join("fast", 0) or protocol.join("slow", 0))] or protocol.published(
        0, "a", 0
    )
    (commit,) = protocol.staged("fast", fast.call, "a", 0)
    protocol.committed("fast", commit.call, 0)
    assert protocol.withdraw() == []
    assert protocol.join("late", 0) == []
    assert not protocol.settled()
    commit, retired = protocol.staged("slow", slow.call, "a", 0)
    assert (type(commit), retired) == (Commit, Retire(0))
    asked = protocol.published(1, "b", 0)
    assert [(type(i), i.replica) for i in asked] == [(Stage, "fast"), (Stage, "late")]
