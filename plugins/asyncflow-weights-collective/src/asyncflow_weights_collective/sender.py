"""The publisher's side: who asks within a moment for the same version forms a group."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncflow_weights_collective.group import Membership, Place, connect, send

__all__ = ["Held", "Sender", "ask", "version_key"]

_log = logging.getLogger(__name__)
_COUNT = "requests"
_LOOK_S = 0.02
"""Between two looks for requests. A wait of the store's own would write two lines to the log each
time that it ends without one."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A published version in host memory."""

    buffers: Sequence[NDArray[np.uint8]]
    places: tuple[Place, ...]


def version_key(version: int, life: int) -> str:
    """Name of a version in the store."""
    return f"{version}/{life}"


def ask(store: Any, key: str) -> dict[str, Any] | None:
    """A replica's request: how to join the group that gets the version; None if it is gone."""
    number = store.add(_COUNT, 1)
    store.set(f"request/{number}", key)
    answer = f"answer/{number}"
    store.wait([answer])
    given: dict[str, Any] | None = json.loads(store.get(answer))
    store.delete_key(answer)
    return given


class Sender(threading.Thread):
    """Answers requests, one group after another; each group is sent to on a thread of its own."""

    def __init__(
        self, member: Membership, find: Callable[[str], Held | None], *, gather_s: float
    ) -> None:
        """Prepare.

        Args:
            member: where the store is, and the limits; the rest is filled in for each group.
            find: a version by its key, None if it is not held.
            gather_s: how long a group waits for more members.
        """
        super().__init__(name="weights-sender", daemon=True)
        self._member = member
        self._find = find
        self._gather_s = gather_s
        self._store = connect(member.host, member.port, member.timeout_s)
        self._stopped = threading.Event()
        self._numbered = 0
        self._to_come: dict[int, float] = {}
        self._groups = 0
        self._past: deque[tuple[float, str]] = deque()

    def stop(self) -> None:
        """End after the request under way; broadcasts end by their deadline."""
        self._stopped.set()
        self.join()

    def run(self) -> None:
        """Gather requests and send."""
        while not self._stopped.wait(_LOOK_S):
            self._forget()
            waiting = self._arrived()
            if not waiting:
                continue
            self._stopped.wait(self._gather_s)
            waiting += self._arrived()
            for key in dict.fromkeys(key for _, key in waiting):
                self._form([number for number, asked in waiting if asked == key], key)

    def _arrived(self) -> list[tuple[int, str]]:
        """Requests that have come.

        A replica takes its number first: one that died before it asked holds up nobody behind it.
        """
        until = time.monotonic() + self._member.timeout_s
        count = self._store.add(_COUNT, 0)
        self._to_come |= dict.fromkeys(range(self._numbered + 1, count + 1), until)
        self._numbered = count
        found = []
        for number in list(self._to_come):
            name = f"request/{number}"
            if self._store.check([name]):
                found.append((number, self._store.get(name).decode()))
                self._store.delete_key(name)
            elif time.monotonic() < self._to_come[number]:
                continue
            del self._to_come[number]
        return found

    def _forget(self) -> None:
        """Take what past groups left out of the store, once nobody can still join them."""
        while self._past and self._past[0][0] < time.monotonic():
            _, group = self._past.popleft()
            for name in self._store.list_keys():
                if name.startswith(f"{group}/"):
                    self._store.delete_key(name)

    def _form(self, numbers: Sequence[int], key: str) -> None:
        held = self._find(key)
        if held is None:
            for number in numbers:
                self._store.set(f"answer/{number}", "null")
            return
        self._groups += 1
        lead = replace(
            self._member,
            group=f"group/{self._groups}",
            world_size=len(numbers) + 1,
            buckets=held.places,
        )
        for rank, number in enumerate(numbers, 1):
            member = replace(lead, rank=rank)
            self._store.set(f"answer/{number}", json.dumps(member.to_dict()))
        # Whoever does not join by the deadline fails by it.
        self._past.append((time.monotonic() + 2 * lead.timeout_s, lead.group))
        threading.Thread(
            target=_send, args=(lead, held, key), name=f"weights-{lead.group}", daemon=True
        ).start()


def _send(lead: Membership, held: Held, key: str) -> None:
    try:
        send(lead, held.buffers)
    except Exception as error:  # noqa: BLE001 - the members fail by themselves and ask again
        _log.warning(
            "broadcast of version %s to %d replicas failed: %s", key, lead.world_size - 1, error
        )
