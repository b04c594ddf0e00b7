"""The calling end of the lane, for a thread of its own; see `lane.py`."""

from __future__ import annotations

import itertools
import select
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from asyncflow_core.errors import (
    AsyncFlowError,
    ConfigError,
    PeerLostError,
    ServiceClosedError,
    ServiceTimeoutError,
    WireDecodeError,
    error_from_code,
)
from asyncflow_core.wire import WIRE_VERSION, Encoder, Limits, decode
from asyncflow_store_zmq.lane import CHUNK, MAX_PARTS, Inbox, framed

__all__ = ["LaneClient"]

_PATIENCE_S = 30
"""With a store that does not let in, or takes nothing."""
_TIMEVAL = struct.Struct("@ll")
_LONGEST_S = 86400.0


class LaneClient:
    """As core's `BlockingClient`: `send` and `wait`, any number of calls under way.

    Concurrency: for one thread at a time.
    """

    def __init__(self, path: Path, *, name: str, token: str) -> None:
        """Where the store listens, this process's name in the run, and the store's secret."""
        self._path, self.name, self._token = path, name, token
        self._encoder = Encoder()
        self._inbox = Inbox(Limits())
        self._numbers = itertools.count(1)
        self._sock: socket.socket | None = None
        self._poll = select.poll()
        self._waiting: set[int] = set()
        self._results: dict[int, Any] = {}
        self._lost = ""

    def open(self) -> None:
        """Connect and shake hands.

        Raises:
            PeerLostError: nobody listens.
            ProtocolError: the store has another token or wire version.
        """
        self._sock = sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_PATIENCE_S)
            sock.connect(str(self._path))
            # From here on the system keeps the time: Python's timeouts are two more system calls
            # for each.
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(_PATIENCE_S, 0))
            self._poll.register(sock, select.POLLIN)
            self._send([WIRE_VERSION, self._token, self.name])
            message = self._next(time.monotonic() + _PATIENCE_S)
        except OSError as error:
            self._lose(f"no store answers at {self._path} ({error}); is it running?")
        match message:
            case [int(version)] if version == WIRE_VERSION:
                return
            case [str(code), str(text)]:
                self.close()
                raise error_from_code(code, text)
            case _:
                self._lose(f"the store at {self._path} gave no answer; is it running?")

    def close(self) -> None:
        """Disconnect. Idempotent."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def send(
        self, method: str, arguments: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> int:
        """Begin a call; its number is for `wait`.

        Args:
            method: `store.` and the name of a method.
            arguments: its list, as `m`.
            timeout_s: not used: the methods that wait are told how long.

        Raises:
            PeerLostError: the store is gone.
            DataError: the arguments cannot be sent.
        """
        number = next(self._numbers)
        self._send([number, method.removeprefix("store."), arguments["m"]])
        self._waiting.add(number)
        return number

    def wait(self, number: int, *, timeout_s: float) -> Any:
        """The result of a call.

        Raises:
            AsyncFlowError: what the store raised.
            ServiceTimeoutError: no answer within `timeout_s`; it may be waited for again.
            PeerLostError: the store is gone; whether it did the work is unknown.
        """
        if number not in self._results:
            deadline = time.monotonic() + timeout_s
            while number not in self._results:
                if number not in self._waiting:
                    raise ServiceClosedError(f"call {number} was never begun, or is over")
                self._take(deadline)
        self._waiting.discard(number)
        value = self._results.pop(number)
        if isinstance(value, AsyncFlowError):
            raise value
        return value

    def forget(self, number: int) -> None:
        """Nobody waits for a call any more: its answer, which may come yet, is not kept."""
        self._waiting.discard(number)
        self._results.pop(number, None)

    def under_way(self, number: int) -> bool:
        """Whether a call's result may still be waited for."""
        return number in self._waiting

    def _take(self, deadline: float) -> None:
        match self._next(deadline):
            case [int(number), value]:
                pass
            case [int(number), str(code), str(text)]:
                value = error_from_code(code, text)
                if isinstance(value, ConfigError):
                    value = ConfigError(value.faults[0].split("\n"))
            case None:
                raise ServiceTimeoutError("no answer from the store in time", service="store")
            case _:
                self._lose("the store sent a message of no known kind")
        if number in self._waiting:
            self._results[number] = value

    def _next(self, deadline: float) -> Any:
        """The next message; None when none came by the deadline."""
        while (parts := self._inbox.take()) is None:
            sock = self._usable()
            left = min(max(0.0, deadline - time.monotonic()), _LONGEST_S)
            if not self._poll.poll(left * 1e3):
                if time.monotonic() < deadline:
                    continue
                return None
            try:
                data = sock.recv(CHUNK)
            except OSError as error:
                self._lose(f"the store at {self._path} is gone: {error}")
            if not data:
                self._lose(f"the store at {self._path} is gone: its process ended")
            self._inbox.add(data)
        try:
            return decode(parts, limits=self._inbox.limits)
        except WireDecodeError as error:
            self._lose(f"the store sent what cannot be read: {error}")

    def _send(self, message: list[Any]) -> None:
        sock = self._usable()
        # A note is its sender's; all else has the form of its call.
        parts = framed(self._encoder.encode(message, known=message[1] != "notify"))
        if len(parts) > MAX_PARTS:
            parts = [b"".join(parts)]
        try:
            sent = sock.sendmsg(parts)
            if sent < sum(map(len, parts)):
                sock.sendall(memoryview(b"".join(parts))[sent:])
        except OSError as error:
            self._lose(f"the store at {self._path} is gone: {error}")
        except BaseException:  # of a signal: half of the message may have left
            self._lost = f"a call to the store at {self._path} was cut off as it was sent"
            self.close()
            raise

    def _usable(self) -> socket.socket:
        if self._lost:
            raise PeerLostError(self._lost, service="store")
        if self._sock is None:
            raise ServiceClosedError("the client of the store is not open")
        return self._sock

    def _lose(self, reason: str) -> NoReturn:
        self._lost = reason
        self.close()
        raise PeerLostError(reason, service="store")
