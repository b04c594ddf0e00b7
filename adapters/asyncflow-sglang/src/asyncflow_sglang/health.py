"""What is believed of a server, from what was seen. Pure.

```mermaid
stateDiagram-v2
  [*] --> starting
  starting --> stale: it answers
  stale --> ready: it holds the current weights, proven
  ready --> stale: other weights, or an update that failed
  starting --> lost: it ended, or never answered
  stale --> lost: it ended, hangs or refuses
  ready --> lost: it ended, hangs or refuses
  lost --> stale: it answers again
```

Only a ready server gets requests. A paused server answers all the same: it is looked at through an
endpoint that neither generates nor waits for a pause to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Health", "State"]

_MISSES = 3


class State(StrEnum):
    """Of a server."""

    STARTING = "starting"
    STALE = "stale"
    READY = "ready"
    LOST = "lost"


@dataclass(slots=True)
class Health:
    """State of one server.

    Attributes:
        now: when it began, of the caller's clock; later the time of the last change.
        state: see `State`.
        reason: of the state, in words.
        label: of the weights it was proven to hold.
    """

    now: float
    state: State = State.STARTING
    reason: str = "it has not answered yet"
    label: str | None = None
    _misses: int = 0

    def answered(self, label: str, now: float) -> None:
        """It answered, and named the weights it serves."""
        self._misses = 0
        if self.state in (State.STARTING, State.LOST):
            self._become(State.STALE, "it has just come up", now)
        elif self.state is State.READY and label != self.label:
            self._become(State.STALE, f"it serves weights {label!r}, not {self.label!r}", now)

    def missed(self, reason: str, now: float, *, refused: bool) -> None:
        """It did not answer; one that refuses connections has nobody behind its port."""
        if self.state is State.STARTING:
            self.reason = reason  # its deadline is the caller's
            return
        self._misses += 1
        if refused or self._misses >= _MISSES:
            self.lost(reason, now)

    def lost(self, reason: str, now: float) -> None:
        """It ended, hangs, or is out of reach."""
        self._become(State.LOST, reason, now)

    def restarted(self, now: float) -> None:
        """It was started again."""
        self._misses = 0
        self._become(State.STARTING, "it was started again and has not answered yet", now)

    def doubted(self, reason: str, now: float) -> None:
        """An update of its weights began or failed: nobody knows what it holds."""
        if self.state in (State.STALE, State.READY):
            self._become(State.STALE, reason, now)

    def confirmed(self, label: str, now: float) -> None:
        """It holds these weights, proven."""
        self.label = label
        self._become(State.READY, "", now)

    def _become(self, state: State, reason: str, now: float) -> None:
        if state is not State.READY:
            self.label = None
        if state is not self.state:
            self.now = now
        self.state, self.reason = state, reason
