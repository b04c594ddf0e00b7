"""Who registered which task, over the lives of clients and of the store."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.wire import Peer

__all__ = ["Registrations"]


class Registrations:
    """By a handle that nobody guesses. They outlive their clients, who come back by their name."""

    def __init__(self) -> None:
        """None."""
        self._held: dict[str, tuple[TaskSpec, Peer]] = {}

    def again(self, tasks: Iterable[TaskSpec]) -> None:
        """Those of an earlier life of the store: whoever registers an equal task takes one over."""
        nobody = Peer(b"", "", alive=False)
        for task in tasks:
            self.add(task, nobody)

    def add(self, task: TaskSpec, peer: Peer) -> str:
        """A new one; its handle."""
        handle = secrets.token_hex(8)
        self._held[handle] = task, peer
        return handle

    def take_over(self, task: TaskSpec, peer: Peer) -> str | None:
        """The handle of an equal one whose client is gone, or had this name."""
        for handle, (held, owner) in self._held.items():
            if owner.name in ("", peer.name) and not owner.alive and held == task:
                self._held[handle] = task, peer
                return handle
        return None

    def end(self, handle: str) -> TaskSpec | None:
        """Whose task loses a member; None where it was ended before."""
        held = self._held.pop(handle, None)
        return None if held is None else held[0]
