"""The calling side of the wire without an event loop."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncflow_core.errors import (
    AsyncFlowError,
    BackpressureError,
    ServiceClosedError,
    ServiceTimeoutError,
)
from asyncflow_core.wire import _protocol as p
from asyncflow_core.wire._gate import encrypt_client
from asyncflow_core.wire._link import WATCHED, Link, check_timeout
from asyncflow_core.wire._socket import COPY_BELOW, Heartbeat, new_socket
from asyncflow_core.wire._typed import builder
from asyncflow_core.wire.addresses import check_path, check_reach
from asyncflow_core.wire.codec import Buffer, Encoder, unpack
from asyncflow_core.wire.keys import KeyPair
from asyncflow_core.wire.limits import Limits

__all__ = ["BlockingClient"]

_LOOK_MS = 200
"""How often a wait looks whether the server is still there."""
_GRACE_S = 1.0
"""For the answer of a server that ended a call at its deadline."""
_NOBLOCK = int(zmq.NOBLOCK)


class BlockingClient:
    """As `Client`, for a thread of its own: `send` and `wait`, or `call` for both.

    Any number of calls may be under way; their results are taken in any order.

    Concurrency: for one thread at a time.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        token: str,
        timeout_s: float = 60.0,
        connect_s: float = 30.0,
        limits: Limits | None = None,
        heartbeat: Heartbeat | None = None,
        keys: KeyPair | None = None,
    ) -> None:
        """Keep the settings; they are those of `Client`."""
        self._link = Link(
            address,
            name=name,
            token=token,
            connect_s=connect_s,
            limits=limits,
            heartbeat=heartbeat,
            keys=keys,
        )
        self.timeout_s = timeout_s
        self._encoder = Encoder(self._link.limits)
        self._numbers = itertools.count(1)
        self._sock: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._waiting: set[int] = set()
        self._results: dict[int, Any] = {}

    @property
    def name(self) -> str:
        """Of this process in the run."""
        return self._link.name

    @property
    def service(self) -> str:
        """Name of the server; its address until it has said it."""
        return self._link.service

    def open(self) -> None:
        """Connect and shake hands.

        Raises:
            AsyncFlowError: as `Client.open`.
        """
        link = self._link
        check_reach(link.address, bind=False, keys=link.keys is not None)
        check_path(link.where, bind=False)
        self._sock = new_socket(zmq.DEALER, link.where, link.limits, link.heartbeat)
        if link.keys is not None and link.server_key is not None:
            encrypt_client(self._sock, link.keys, link.server_key)
        self._monitor = self._sock.get_monitor_socket(WATCHED)
        try:
            self._sock.connect(link.where)
            self._send(link.hello())
            deadline = time.monotonic() + link.connect_s
            while not link.welcomed:
                if not self._take(deadline):
                    raise link.unanswered()
        except BaseException:
            self._close()
            raise

    def close(self) -> None:
        """Say goodbye and close. Idempotent."""
        if self._sock is not None:
            if self._link.lost is None:
                with contextlib.suppress(BackpressureError):  # it takes nothing, not even a goodbye
                    self._send([p.BYE])
            self._close()

    def _close(self) -> None:
        if self._sock is not None and self._monitor is not None:
            self._sock.disable_monitor()
            self._monitor.close(0)
            self._sock.close()
        self._sock = self._monitor = None

    def __enter__(self) -> Self:
        """Open."""
        self.open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def call(
        self,
        method: str,
        arguments: Mapping[str, Any],
        *,
        returns: Any = Any,
        timeout_s: float | None = None,
    ) -> Any:
        """`send`, then `wait`; past its deadline the handler is cancelled, and the call is over."""
        number = self.send(method, arguments, timeout_s=timeout_s)
        late_s = None if timeout_s is None else timeout_s + _GRACE_S
        try:
            return self.wait(number, returns=returns, timeout_s=late_s)
        except ServiceTimeoutError:
            self.forget(number)
            raise

    def forget(self, number: int) -> None:
        """Nobody waits for a call any more: its handler is cancelled, its answer not kept."""
        if number in self._waiting:
            self._waiting.discard(number)
            self._results.pop(number, None)
            if self._sock is not None and self._link.lost is None:
                with contextlib.suppress(BackpressureError):
                    self._send([p.CANCEL, number])

    def send(
        self, method: str, arguments: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> int:
        """Begin a call; its number is for `wait`.

        Args:
            method: name of the service and the method, with a dot between.
            arguments: by name; large arrays may not change before the call is over.
            timeout_s: deadline at the server; the client's without it.

        Raises:
            AsyncFlowError: as `Client.call`.
        """
        self._check_usable()
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        check_timeout(deadline_s)
        number = next(self._numbers)
        self._send([p.CALL, number, method, deadline_s, arguments])
        self._waiting.add(number)
        return number

    def wait(self, number: int, *, returns: Any = Any, timeout_s: float | None = None) -> Any:
        """The result of a call.

        Raises:
            AsyncFlowError: what the handler raised; as `Client.call`.
            ServiceTimeoutError: no answer within `timeout_s`; it may be waited for again.
        """
        if timeout_s is None:
            timeout_s = self.timeout_s + _GRACE_S
        deadline = time.monotonic() + timeout_s
        while number not in self._results:
            if number not in self._waiting:
                raise ServiceClosedError(f"call {number} was never begun, or is over")
            if not self._take(deadline):
                raise ServiceTimeoutError(
                    f"no answer from {self.service!r} in time", service=self.service
                )
        self._waiting.discard(number)
        value = self._results.pop(number)
        if isinstance(value, AsyncFlowError):
            raise value
        return value if returns is Any else builder(strict=False).build(returns, value, "result")

    def under_way(self, number: int) -> bool:
        """Whether a call's result may still be waited for."""
        return number in self._waiting

    def answered(self, number: int) -> bool:
        """Whether a call's result has come; takes what has come, without waiting."""
        while number not in self._results and self._take(0.0):
            pass
        return number in self._results

    def _check_usable(self) -> None:
        self._link.check()
        if self._sock is None:
            raise self._link.not_open()

    def _send(self, message: list[Any]) -> None:
        assert self._sock is not None
        try:
            self._sock.send_multipart(self._encoder.encode(message), _NOBLOCK, copy=False)
        except zmq.Again:
            raise self._link.stuck() from None

    def _take(self, deadline: float) -> bool:
        """Take one message; False when none came by the deadline."""
        self._check_usable()
        assert self._sock is not None
        while not self._sock.poll(self._slice_ms(deadline)):
            self._check_server()
            if time.monotonic() >= deadline:
                return False
        try:
            header = self._sock.recv(_NOBLOCK)
        except zmq.Again:  # its peer went away meanwhile: the caller looks again
            return time.monotonic() < deadline
        frames: list[Buffer] = []
        while self._sock.get(zmq.RCVMORE):
            frame = self._sock.recv(_NOBLOCK, copy=False)
            if len(frames) <= self._link.limits.frames:
                frames.append(frame.bytes if len(frame) < COPY_BELOW else frame.buffer)
        try:
            self._on_message(unpack(header, frames, self._link.limits))
        except AsyncFlowError as error:
            self._link.lost = error
            raise
        return True

    def _slice_ms(self, deadline: float) -> int:
        return round(min(_LOOK_MS, max(0.0, (deadline - time.monotonic()) * 1000)))

    def _check_server(self) -> None:
        """Whether the connection ended."""
        assert self._monitor is not None
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            if event["event"] & WATCHED and self._link.lost is None:
                self._link.lost = self._link.ended(event["event"])
        self._link.check()

    def _on_message(self, message: Any) -> None:
        match message:
            case [p.REPLY, int(number), value]:
                self._settle(number, value)
            case [p.ERROR, int(number), str(code), str(text)]:
                self._settle(number, p.rebuild_error(code, text, self.service))
            case _:
                self._link.take(message)

    def _settle(self, number: int, value: Any) -> None:
        if number in self._waiting:
            self._results[number] = value
