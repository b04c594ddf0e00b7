"""The publisher's side: who asks within a moment for the same version forms a group."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncflow_weights_collective.group import Membership, Place, connect, dist, send

__all__ = ["Held", "Sender", "ask", "version_key"]

_log = logging.getLogger(__name__)
_TICK = timedelta(seconds=0.2)


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
    number = store.add("requests", 1)
    store.set(f"request/{number}", key)
    answer = f"answer/{number}"
    store.wait([answer])
    given: dict[str, Any] | None = json.loads(store.get(answer))
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
        self._next = 1
        self._groups = 0

    def stop(self) -> None:
        """End after the request under way; broadcasts end by their deadline."""
        self._stopped.set()
        self.join()

    def run(self) -> None:
        """Gather requests and send."""
        while not self._stopped.is_set():
            request = self._request(_TICK)
            if request is None:
                continue
            waiting, until = [request], time.monotonic() + self._gather_s
            while (left := until - time.monotonic()) > 0:
                more = self._request(timedelta(seconds=max(left, 0.001)))
                if more is not None:
                    waiting.append(more)
            for key in dict.fromkeys(key for _, key in waiting):
                self._form([number for number, asked in waiting if asked == key], key)

    def _request(self, limit: timedelta) -> tuple[int, str] | None:
        name = f"request/{self._next}"
        try:
            self._store.wait([name], limit)
        except dist.DistError:
            return None
        number, self._next = self._next, self._next + 1
        return number, self._store.get(name).decode()

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
