"""What the weight protocol asks for; reports cite the `call` of what they answer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Commit", "Compare", "Fail", "Instruction", "Retire", "Stage"]


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
    """A replica cannot be brought to a version; `final` where a new process would fail as well."""

    replica: str
    version: int
    reason: str
    final: bool = False


Instruction = Stage | Commit | Compare | Retire | Fail
