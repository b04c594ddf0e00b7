"""The weight protocol as a pure state machine: stage, verify, confirm, commit, catch up.

The controller feeds it what happened and carries out what it answers. It holds that

- a replica serves only versions whose checksum it has confirmed, in increasing order;
- a failed stage or commit leaves the version that serves, is tried again, and after `attempts`
  or at its deadline is a `Fail` that names replica, version and reason;
- a slow replica holds up nobody else: each is asked for the newest version when it is free;
- a version is retired once it is not the newest and no replica is staging it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Commit", "Fail", "Instruction", "Retire", "Stage", "WeightProtocol"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Let a replica take in a version beside the one that serves; its report cites `call`."""

    replica: str
    version: int
    call: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Let a replica serve the version it has confirmed; its report cites `call`."""

    replica: str
    version: int
    call: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Nobody will fetch a version again."""

    version: int


@dataclass(frozen=True, slots=True)
class Fail:
    """A replica cannot be brought to a version."""

    replica: str
    version: int
    reason: str


Instruction = Stage | Commit | Retire | Fail


class _Phase(StrEnum):
    IDLE = "idle"
    STAGING = "staging"
    COMMITTING = "committing"
    FAILED = "failed"


@dataclass(slots=True)
class _Replica:
    serving: int | None = None
    phase: _Phase = _Phase.IDLE
    target: int = -1
    call: int = -1
    attempt: int = 0
    deadline: float = 0.0


@dataclass(slots=True)
class WeightProtocol:
    """Brings every replica to the newest published version.

    Attributes:
        stage_timeout_s: deadline of one stage, from its instruction to its report.
        commit_timeout_s: deadline of one commit.
        attempts: stages of one version a replica may need.
    """

    stage_timeout_s: float = 300.0
    commit_timeout_s: float = 300.0
    attempts: int = 2
    _checksums: dict[int, str] = field(default_factory=dict)
    _newest: int | None = None
    _calls: int = 0
    _replicas: dict[str, _Replica] = field(default_factory=dict)

    def serving(self, replica: str) -> int | None:
        """The version a replica has confirmed and serves; None before its first."""
        return self._replicas[replica].serving

    def waiting(self, now: float) -> list[str]:
        """One line for each replica that is on its way, for the wait-for graph."""
        return [
            f"{name} is {r.phase} version {r.target}, {r.deadline - now:.0f} s left"
            for name, r in self._replicas.items()
            if r.phase in (_Phase.STAGING, _Phase.COMMITTING)
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

    def published(self, version: int, checksum: str, now: float) -> list[Instruction]:
        """The trainer's side holds a new version."""
        self._checksums[version] = checksum
        if self._newest is None or version > self._newest:
            self._newest = version
        found: list[Instruction] = []
        for name in self._replicas:
            found.extend(self._proceed(name, now))
        return found + list(self._retire())

    def staged(self, replica: str, call: int, checksum: str, now: float) -> list[Instruction]:
        """A replica reports what it really holds."""
        state = self._awaited(replica, call)
        if state is None or state.phase is not _Phase.STAGING:
            return []
        published = self._checksums[state.target]
        if checksum != published:
            reason = f"checksum {checksum} is not the published {published}"
            return self.failed(replica, call, reason, now)
        state.phase, state.deadline = _Phase.COMMITTING, now + self.commit_timeout_s
        state.call = self._next_call()
        return [Commit(replica, state.target, state.call), *self._retire()]

    def failed(self, replica: str, call: int, reason: str, now: float) -> list[Instruction]:
        """A stage or commit of a replica failed; what served serves on."""
        state = self._awaited(replica, call)
        if state is None:
            return []
        state.phase = _Phase.IDLE
        if state.attempt < self.attempts:
            return list(self._proceed(replica, now)) + list(self._retire())
        state.phase = _Phase.FAILED
        return [Fail(replica, state.target, reason), *self._retire()]

    def committed(self, replica: str, call: int, now: float) -> list[Instruction]:
        """A replica serves what it was told to."""
        state = self._awaited(replica, call)
        if state is None or state.phase is not _Phase.COMMITTING:
            return []
        state.phase, state.serving, state.attempt = _Phase.IDLE, state.target, 0
        return list(self._proceed(replica, now)) + list(self._retire())

    def tick(self, now: float) -> list[Instruction]:
        """Time passed: what missed its deadline has failed."""
        found: list[Instruction] = []
        for name, state in self._replicas.items():
            if state.phase in (_Phase.STAGING, _Phase.COMMITTING) and now >= state.deadline:
                state.attempt = self.attempts  # a replica that does not answer is not asked again
                reason = f"no answer while {state.phase}, its deadline passed"
                found.extend(self.failed(name, state.call, reason, now))
        return found

    def _awaited(self, replica: str, call: int) -> _Replica | None:
        """The replica, if `call` is what it was asked last; None for a late report.

        Late are reports of a replica that left, failed, or came back since.
        """
        state = self._replicas.get(replica)
        if state is None or state.call != call:
            return None
        return state if state.phase in (_Phase.STAGING, _Phase.COMMITTING) else None

    def _next_call(self) -> int:
        self._calls += 1
        return self._calls

    def _proceed(self, replica: str, now: float) -> Iterator[Instruction]:
        state = self._replicas[replica]
        if state.phase is not _Phase.IDLE or self._newest is None:
            return
        if state.serving is not None and state.serving >= self._newest:
            return
        state.attempt = state.attempt + 1 if state.target == self._newest else 1
        state.phase, state.target = _Phase.STAGING, self._newest
        state.deadline = now + self.stage_timeout_s
        state.call = self._next_call()
        yield Stage(replica, self._newest, state.call)

    def _retire(self) -> Iterator[Instruction]:
        # A replica that commits holds the bytes already: a slow switch must not hold up the trainer.
        fetched = {s.target for s in self._replicas.values() if s.phase is _Phase.STAGING}
        for version in sorted(self._checksums):
            if version != self._newest and version not in fetched:
                del self._checksums[version]
                yield Retire(version)
