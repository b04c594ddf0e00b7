"""A client is its process's own: a child that is forked from it has none.

Both would fill the same memory and take each other's answers, without an error. `fork` copies
clients into the workers of a `DataLoader` or of `multiprocessing`, among others.
"""

from __future__ import annotations

import os
from typing import Any, Protocol
from weakref import WeakSet

__all__ = ["FORKED", "watch"]

FORKED = (
    "this client of the data store belongs to the process from which this one was forked; open "
    "another one here"
)


class _Client(Protocol):
    """What holds a connection."""

    def forked(self) -> None:
        """This is a child's copy: use nothing of it, and end nothing."""


_open: WeakSet[Any] = WeakSet()


def watch(client: _Client) -> None:
    """From now on it is told of a fork, in the child."""
    _open.add(client)


def _tell() -> None:
    for client in list(_open):
        client.forked()


os.register_at_fork(after_in_child=_tell)
