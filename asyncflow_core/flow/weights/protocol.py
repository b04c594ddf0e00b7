"""The weight protocol as a pure state machine: stage, verify, confirm, commit, catch up.

The controller feeds it what happened and carries out what it answers. It holds that

- a replica serves only weights whose checksum it has confirmed, in increasing order of (life,
  version): the first weights of a new life of the run come after all of the life before;
- a failed stage or commit leaves what serves, is tried again, and after `attempts` or at its
  deadline is a `Fail` that names replica, version and reason;
- a slow replica holds up nobody else: each is asked for the newest version when it is free;
- a version that is still coming (`coming`) may be staged, once by each replica, and is committed
  only when it has come whole (`published`) and the checksums are equal;
- every `compare_every`-th version is compared bit for bit once it serves, and a difference fails;
- a version is retired once no replica needs its bytes and none will: it is not the newest, or it
  was withdrawn, which makes room for the next one where the transport holds one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from asyncflow_core.errors import InvariantError
from asyncflow_core.flow.weights.instructions import (
    Commit,
    Compare,
    Fail,
    Instruction,
    Retire,
    Stage,
)

__all__ = ["WeightProtocol"]


class _Weights(NamedTuple):
    """Which weights; ordered."""

    life: int
    version: int


class _Phase(StrEnum):
    IDLE = "idle"
    STAGING = "staging"
    STAGED = "done with"
    COMMITTING = "committing"
    COMPARING = "comparing"
    FAILED = "failed"


_NONE = _Weights(-1, -1)
_ASKED = (_Phase.STAGING, _Phase.COMMITTING, _Phase.COMPARING)
_COMING = ""
"""Instead of a checksum: the trainer's side does not know it yet."""


@dataclass(slots=True)
class _Replica:
    serving: _Weights | None = None
    phase: _Phase = _Phase.IDLE
    target: _Weights = _NONE
    call: int = -1
    attempt: int = 0
    deadline: float = 0.0
    checksum: str = ""


@dataclass(slots=True)
class WeightProtocol:
    """Brings every replica to the newest published version.

    Attributes:
        stage_timeout_s: deadline of one stage or comparison, from its instruction to its report;
            that of a version still coming begins when it is there.
        commit_timeout_s: deadline of one commit.
        attempts: stages of one version a replica may need.
        compare_every: versions from one comparison to the next; 0 for none.
        failures: what failed so far, retried or not.
    """

    stage_timeout_s: float = 300.0
    commit_timeout_s: float = 300.0
    attempts: int = 2
    compare_every: int = 0
    failures: int = 0
    _checksums: dict[_Weights, str] = field(default_factory=dict)
    _newest: _Weights | None = None
    _withdrawn: bool = False
    _calls: int = 0
    _replicas: dict[str, _Replica] = field(default_factory=dict)

    def serving(self, replica: str) -> int | None:
        """The version a replica has confirmed and serves; None before its first."""
        serving = self._replicas[replica].serving
        return None if serving is None else serving.version

    def waiting(self, now: float) -> list[str]:
        """One line for each replica that is on its way, for the wait-for graph."""
        lines = []
        for name, r in self._replicas.items():
            if r.phase in (*_ASKED, _Phase.STAGED):
                comes = self._comes(r.target)
                left = "which still comes" if comes else f"{r.deadline - now:.0f} s left"
                lines.append(f"{name} is {r.phase} version {r.target.version}, {left}")
            elif self._withdrawn and r.phase is _Phase.IDLE and r.serving != self._newest:
                lines.append(f"{name} waits for the next version: the transport holds one")
        return lines

    def settled(self) -> bool:
        """Whether every replica serves the newest version."""
        return self._newest is not None and all(
            r.phase is _Phase.IDLE and r.serving == self._newest for r in self._replicas.values()
        )

    def join(self, replica: str, now: float) -> list[Instruction]:
        """A replica came up, or came back, with nothing confirmed: it catches up first."""
        self._replicas[replica] = _Replica()
        return list(self._proceed(replica, now)) + list(self._retire())

    def leave(self, replica: str) -> list[Instruction]:
        """A replica is gone."""
        self._replicas.pop(replica, None)
        return list(self._retire())

    def coming(self, version: int, now: float, *, life: int = 0) -> list[Instruction]:
        """The trainer's side begins with a version and gives what it has; then comes `published`.

        One that is known, or older than the newest, changes nothing. If the next one begins before
        this one was published, its trainer died: nobody waits for it any more.
        """
        weights = _Weights(life, version)
        if self._newest is not None and weights <= self._newest:
            return []
        return self._add(weights, _COMING, now)

    def published(
        self, version: int, checksum: str, now: float, *, life: int = 0
    ) -> list[Instruction]:
        """The trainer's side holds a new version, all of it.

        The same one told twice changes nothing; one older than the newest is of no use any more.

        Raises:
            InvariantError: other weights were published as this version.
        """
        weights = _Weights(life, version)
        known = self._checksums.get(weights)
        if known == _COMING:
            return self._came(weights, checksum, now)
        if known is not None and known != checksum:
            raise InvariantError(
                f"version {version} of life {life} was published twice, with the checksums {known} "
                f"and {checksum}; two trainers run, or one trained a step twice"
            )
        if known is not None:
            return []
        if self._newest is not None and weights <= self._newest:
            return [Retire(version, life)]
        return self._add(weights, checksum, now)

    def withdraw(self) -> list[Instruction]:
        """The newest version makes room for the next: nobody further is asked to take it in.

        Those that were asked already take it in first. One that fails to, or comes up now, waits
        for the next version.
        """
        self._withdrawn = True
        return list(self._retire())

    def _add(self, weights: _Weights, checksum: str, now: float) -> list[Instruction]:
        self._checksums[weights] = checksum
        before, self._newest, self._withdrawn = self._newest, weights, False
        found: list[Instruction] = []
        for name, state in self._replicas.items():
            if before is not None and state.target == before and self._unknown(before):
                state.deadline = now + self.stage_timeout_s
                if state.phase is _Phase.STAGED:
                    state.phase = _Phase.IDLE
            found.extend(self._proceed(name, now))
        return found + list(self._retire())

    def _came(self, weights: _Weights, checksum: str, now: float) -> list[Instruction]:
        self._checksums[weights] = checksum
        found: list[Instruction] = []
        for name, state in self._replicas.items():
            if state.target == weights and state.phase is _Phase.STAGED:
                found.extend(self._judge(name, state, now))
            elif state.target == weights and state.phase is _Phase.STAGING:
                state.deadline = now + self.stage_timeout_s
            else:
                found.extend(self._proceed(name, now))
        return found + list(self._retire())

    def staged(self, replica: str, call: int, checksum: str, now: float) -> list[Instruction]:
        """A replica reports what it really holds."""
        state = self._awaited(replica, call, _Phase.STAGING)
        if state is None:
            return []
        state.checksum = checksum
        if self._comes(state.target):
            state.phase = _Phase.STAGED
            return []
        if self._unknown(state.target):  # and always will be
            state.phase = _Phase.IDLE
            return [*self._proceed(replica, now), *self._retire()]
        return [*self._judge(replica, state, now), *self._retire()]

    def _judge(self, replica: str, state: _Replica, now: float) -> list[Instruction]:
        """Commit what a replica holds if it is what was published."""
        published = self._checksums[state.target]
        if state.checksum != published:
            state.phase = _Phase.STAGING
            reason = f"checksum {state.checksum} is not the published {published}"
            return self._failed(replica, state, reason, now)
        self._ask(state, _Phase.COMMITTING, now + self.commit_timeout_s)
        return [Commit(replica, state.target.version, state.call, state.target.life)]

    def failed(self, replica: str, call: int, reason: str, now: float) -> list[Instruction]:
        """What a replica was asked to do failed; what served serves on."""
        state = self._awaited(replica, call, *_ASKED)
        return [] if state is None else self._failed(replica, state, reason, now)

    def _failed(
        self, replica: str, state: _Replica, reason: str, now: float, *, final: bool = False
    ) -> list[Instruction]:
        self.failures += 1
        if state.phase is _Phase.STAGING and self._unknown(state.target):
            state.attempt -= 1  # the trainer's side may have failed: it does not count
        retried = state.phase is not _Phase.COMPARING and state.attempt < self.attempts
        if retried:
            state.phase = _Phase.IDLE
            return list(self._proceed(replica, now)) + list(self._retire())
        state.phase = _Phase.FAILED
        return [Fail(replica, state.target.version, reason, final), *self._retire()]

    def committed(self, replica: str, call: int, now: float) -> list[Instruction]:
        """A replica serves what it was told to."""
        state = self._awaited(replica, call, _Phase.COMMITTING)
        if state is None:
            return []
        state.serving, state.attempt = state.target, 0
        if self._compared(state.target):
            self._ask(state, _Phase.COMPARING, now + self.stage_timeout_s)
            return [Compare(replica, state.target.version, state.call, state.target.life)]
        state.phase = _Phase.IDLE
        return list(self._proceed(replica, now)) + list(self._retire())

    def compared(self, replica: str, call: int, difference: str, now: float) -> list[Instruction]:
        """What a replica serves was compared; `difference` is empty if there was none.

        A difference is final: the checksum was right, so that trying again would prove nothing.
        """
        state = self._awaited(replica, call, _Phase.COMPARING)
        if state is None:
            return []
        if difference:
            return self._failed(replica, state, difference, now, final=True)
        state.phase = _Phase.IDLE
        return list(self._proceed(replica, now)) + list(self._retire())

    def tick(self, now: float) -> list[Instruction]:
        """Time passed: what missed its deadline has failed."""
        found: list[Instruction] = []
        for name, state in self._replicas.items():
            due = state.phase in _ASKED and now >= state.deadline
            if due and not self._comes(state.target):
                state.attempt = (
                    self.attempts + 1
                )  # a replica that does not answer is not asked again
                reason = f"no answer while {state.phase}, its deadline passed"
                found.extend(self._failed(name, state, reason, now))
        return found

    def _awaited(self, replica: str, call: int, *phases: _Phase) -> _Replica | None:
        """The replica, if `call` is what it was asked last; None for a late report.

        Late are reports of a replica that left, failed, or came back since.
        """
        state = self._replicas.get(replica)
        return state if state and state.call == call and state.phase in phases else None

    def _ask(self, state: _Replica, phase: _Phase, deadline: float) -> None:
        self._calls += 1
        state.phase, state.deadline, state.call = phase, deadline, self._calls

    def _unknown(self, weights: _Weights) -> bool:
        return self._checksums.get(weights) == _COMING

    def _comes(self, weights: _Weights) -> bool:
        return weights == self._newest and self._unknown(weights)

    def _compared(self, weights: _Weights) -> bool:
        return self.compare_every > 0 and weights.version % self.compare_every == 0

    def _proceed(self, replica: str, now: float) -> Iterator[Instruction]:
        state = self._replicas[replica]
        if state.phase is not _Phase.IDLE or self._newest is None or self._withdrawn:
            return
        if state.serving is not None and state.serving >= self._newest:
            return
        if state.target == self._newest and self._comes(self._newest):
            return  # it was tried while it came; the next time all of it is there
        state.attempt = state.attempt + 1 if state.target == self._newest else 1
        state.target = self._newest
        self._ask(state, _Phase.STAGING, now + self.stage_timeout_s)
        yield Stage(replica, state.target.version, state.call, state.target.life)

    def _retire(self) -> Iterator[Instruction]:
        # A replica that commits holds the bytes already: a slow switch must not hold up the
        # trainer. One whose weights are to be compared needs them once more.
        needed = {
            s.target
            for s in self._replicas.values()
            if s.phase in (_Phase.STAGING, _Phase.COMPARING)
            or (s.phase is _Phase.COMMITTING and self._compared(s.target))
        }
        for weights in sorted(self._checksums):
            newest = weights == self._newest and not self._withdrawn
            if not newest and weights not in needed:
                del self._checksums[weights]
                yield Retire(weights.version, weights.life)
