"""The weight protocol as a pure state machine: stage, verify, confirm, commit, catch up.

The controller feeds it what happened and carries out what it answers. It holds that

- a replica serves only weights whose checksum it has confirmed, in increasing order of (life,
  version): the first weights of a new life of the run come after all of the life before;
- a failed stage or commit leaves what serves, is tried again, and after `attempts` or at its
  deadline is a `Fail` that names replica, version and reason;
- a slow replica holds up nobody else: each is asked for the newest version when it is free;
- every `compare_every`-th version is compared bit for bit once it serves, and a difference fails;
- a version is retired once it is not the newest and no replica needs its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from asyncflow_core.errors import InvariantError

__all__ = ["Commit", "Compare", "Fail", "Instruction", "Retire", "Stage", "WeightProtocol"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Let a replica take in a version beside the one that serves; its report cites `call`."""

    replica: str
    version: int
    call: int
    life: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """Let a replica serve the version it has confirmed; its report cites `call`."""

    replica: str
    version: int
    call: int
    life: int = 0


@dataclass(frozen=True, slots=True)
class Compare:
    """Compare what a replica serves with what was published, bit for bit."""

    replica: str
    version: int
    call: int
    life: int = 0


@dataclass(frozen=True, slots=True)
class Retire:
    """Nobody will fetch a version again."""

    version: int
    life: int = 0


@dataclass(frozen=True, slots=True)
class Fail:
    """A replica cannot be brought to a version."""

    replica: str
    version: int
    reason: str


Instruction = Stage | Commit | Compare | Retire | Fail


class _Weights(NamedTuple):
    """Which weights; ordered."""

    life: int
    version: int


class _Phase(StrEnum):
    IDLE = "idle"
    STAGING = "staging"
    COMMITTING = "committing"
    COMPARING = "comparing"
    FAILED = "failed"


_NONE = _Weights(-1, -1)
_ASKED = (_Phase.STAGING, _Phase.COMMITTING, _Phase.COMPARING)


@dataclass(slots=True)
class _Replica:
    serving: _Weights | None = None
    phase: _Phase = _Phase.IDLE
    target: _Weights = _NONE
    call: int = -1
    attempt: int = 0
    deadline: float = 0.0


@dataclass(slots=True)
class WeightProtocol:
    """Brings every replica to the newest published version.

    Attributes:
        stage_timeout_s: deadline of one stage or comparison, from its instruction to its report.
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
    _calls: int = 0
    _replicas: dict[str, _Replica] = field(default_factory=dict)

    def serving(self, replica: str) -> int | None:
        """The version a replica has confirmed and serves; None before its first."""
        serving = self._replicas[replica].serving
        return None if serving is None else serving.version

    def waiting(self, now: float) -> list[str]:
        """One line for each replica that is on its way, for the wait-for graph."""
        return [
            f"{name} is {r.phase} version {r.target.version}, {r.deadline - now:.0f} s left"
            for name, r in self._replicas.items()
            if r.phase in _ASKED
        ]

    def settled(self) -> bool:
        """Whether every replica serves the newest version."""
        return all(
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

    def published(
        self, version: int, checksum: str, now: float, *, life: int = 0
    ) -> list[Instruction]:
        """The trainer's side holds a new version.

        The same one told twice changes nothing; one older than the newest is of no use any more.

        Raises:
            InvariantError: other weights were published as this version.
        """
        weights = _Weights(life, version)
        known = self._checksums.get(weights)
        if known is not None and known != checksum:
            raise InvariantError(
                f"version {version} of life {life} was published twice, with the checksums {known} "
                f"and {checksum}; two trainers run, or one trained a step twice"
            )
        if known is not None:
            return []
        if self._newest is not None and weights < self._newest:
            return [Retire(version, life)]
        self._checksums[weights] = checksum
        self._newest = weights
        found: list[Instruction] = []
        for name in self._replicas:
            found.extend(self._proceed(name, now))
        return found + list(self._retire())

    def staged(self, replica: str, call: int, checksum: str, now: float) -> list[Instruction]:
        """A replica reports what it really holds."""
        state = self._awaited(replica, call, _Phase.STAGING)
        if state is None:
            return []
        published = self._checksums[state.target]
        if checksum != published:
            reason = f"checksum {checksum} is not the published {published}"
            return self.failed(replica, call, reason, now)
        self._ask(state, _Phase.COMMITTING, now + self.commit_timeout_s)
        commit = Commit(replica, state.target.version, state.call, state.target.life)
        return [commit, *self._retire()]

    def failed(self, replica: str, call: int, reason: str, now: float) -> list[Instruction]:
        """What a replica was asked to do failed; what served serves on."""
        state = self._awaited(replica, call, *_ASKED)
        if state is None:
            return []
        self.failures += 1
        retried = state.phase is not _Phase.COMPARING and state.attempt < self.attempts
        if retried:
            state.phase = _Phase.IDLE
            return list(self._proceed(replica, now)) + list(self._retire())
        state.phase = _Phase.FAILED
        return [Fail(replica, state.target.version, reason), *self._retire()]

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
            return self.failed(replica, call, difference, now)
        state.phase = _Phase.IDLE
        return list(self._proceed(replica, now)) + list(self._retire())

    def tick(self, now: float) -> list[Instruction]:
        """Time passed: what missed its deadline has failed."""
        found: list[Instruction] = []
        for name, state in self._replicas.items():
            if state.phase in _ASKED and now >= state.deadline:
                state.attempt = self.attempts  # a replica that does not answer is not asked again
                reason = f"no answer while {state.phase}, its deadline passed"
                found.extend(self.failed(name, state.call, reason, now))
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

    def _compared(self, weights: _Weights) -> bool:
        return self.compare_every > 0 and weights.version % self.compare_every == 0

    def _proceed(self, replica: str, now: float) -> Iterator[Instruction]:
        state = self._replicas[replica]
        if state.phase is not _Phase.IDLE or self._newest is None:
            return
        if state.serving is not None and state.serving >= self._newest:
            return
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
            if weights != self._newest and weights not in needed:
                del self._checksums[weights]
                yield Retire(weights.version, weights.life)
