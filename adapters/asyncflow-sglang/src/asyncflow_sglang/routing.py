"""Which request goes to which server: least loaded first, prefixes to where they are cached. Pure.

Requests wait in the order in which they came. A server takes requests while it is open and has
fewer than `slots`; the caller opens and closes it as its state changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

__all__ = ["Placement", "Routing"]

Placement = tuple[Hashable, str]
"""A request and the server it goes to."""

_REMEMBERED = 65536


@dataclass(slots=True)
class Routing:
    """Who waits, who runs where.

    Attributes:
        slots: requests a server takes at a time.
        slack: how many more a server with the prefix may have than the least loaded.
    """

    slots: int
    slack: int
    _open: dict[str, bool] = field(default_factory=dict)
    _running: dict[str, set[Hashable]] = field(default_factory=dict)
    _where: dict[Hashable, str] = field(default_factory=dict)
    _waiting: OrderedDict[Hashable, Hashable] = field(default_factory=OrderedDict)
    _homes: OrderedDict[Hashable, str] = field(default_factory=OrderedDict)

    def add(self, server: str) -> None:
        """A server, closed at first."""
        self._open[server] = False
        self._running[server] = set()

    def open(self, server: str) -> list[Placement]:
        """It takes requests from now on."""
        self._open[server] = True
        return self._place()

    def close(self, server: str) -> None:
        """It takes none from now on; what runs there runs on."""
        self._open[server] = False

    def submit(self, request: Hashable, prefix: Hashable) -> list[Placement]:
        """A request comes, or comes back; `prefix` is equal where a cached prefix would help."""
        self._waiting[request] = prefix
        return self._place()

    def done(self, request: Hashable) -> list[Placement]:
        """It ended where it ran, or waits no longer."""
        self._waiting.pop(request, None)
        server = self._where.pop(request, None)
        if server is not None:
            self._running[server].discard(request)
        return self._place()

    def running(self, server: str) -> frozenset[Hashable]:
        """Requests placed there."""
        return frozenset(self._running[server])

    @property
    def waiting(self) -> int:
        """Requests not placed."""
        return len(self._waiting)

    @property
    def any_open(self) -> bool:
        """Whether some server takes requests, full or not."""
        return any(self._open.values())

    def _place(self) -> list[Placement]:
        placed = []
        while self._waiting:
            free = [s for s, opened in self._open.items() if opened and self._room(s)]
            if not free:
                break
            request, prefix = self._waiting.popitem(last=False)
            server = self._choose(free, prefix)
            self._running[server].add(request)
            self._where[request] = server
            placed.append((request, server))
        return placed

    def _choose(self, free: Iterable[str], prefix: Hashable) -> str:
        loads = {server: len(self._running[server]) for server in free}
        least = min(loads, key=lambda server: loads[server])
        home = self._homes.pop(prefix, None)
        chosen = home if home in loads and loads[home] <= loads[least] + self.slack else least
        self._homes[prefix] = chosen
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return chosen

    def _room(self, server: str) -> bool:
        return len(self._running[server]) < self.slots
