"""The calling side of the wire."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Any, Final, Self

import zmq

from asyncflow_core.errors import (
    AsyncFlowError,
    BackpressureError,
    ServiceClosedError,
    ServiceTimeoutError,
)
from asyncflow_core.wire import _protocol as p
from asyncflow_core.wire._gate import encrypt_client
from asyncflow_core.wire._link import WATCHED, Link, check_timeout
from asyncflow_core.wire._socket import Heartbeat, LoopSocket, new_socket
from asyncflow_core.wire._typed import builder
from asyncflow_core.wire.addresses import check_path, check_reach
from asyncflow_core.wire.codec import Buffer, Encoder, unpack
from asyncflow_core.wire.keys import KeyPair
from asyncflow_core.wire.limits import Limits

__all__ = ["DEFAULT_TIMEOUT", "Client"]

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT: Final = -1.0
"""As `timeout_s`: the client's own default."""


class _Stream:
    """Items that have come and are not yet taken; never more than the window."""

    __slots__ = ("ended", "error", "items", "wake")

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.error: AsyncFlowError | None = None
        self.ended = False
        self.wake: asyncio.Future[None] | None = None

    def stir(self) -> None:
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)


class Client:
    """One connection to one server, for one life of both.

    Once the server is lost every call raises `PeerLostError`; it never reconnects by itself, since
    a new process knows nothing of the old one's calls. Open a new client then.

    Concurrency: any number of calls and streams at a time, on the loop that opened it. Cancelling
    a call cancels its handler; closing a stream's iterator closes the server's.
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
        """Keep the settings.

        Args:
            address: as the server prints it.
            name: of this process in the run, unique among the living.
            token: secret of the run.
            timeout_s: deadline of a call that sets none.
            connect_s: how long `open()` waits for the server to come up.
            limits: bounds of a message.
            heartbeat: when a silent server counts as gone.
            keys: this client's pair, for a server whose address has a key.

        Raises:
            ConfigError: what follows the # of the address is no key.
        """
        self._link = Link(
            address,
            name=name,
            token=token,
            connect_s=connect_s,
            limits=limits,
            heartbeat=heartbeat,
            keys=keys,
        )
        self._timeout_s = timeout_s
        self._encoder = Encoder(self._link.limits)
        self._socket: LoopSocket | None = None
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, _Stream] = {}
        self._welcome: asyncio.Future[None] | None = None

    @property
    def name(self) -> str:
        """Of this process in the run."""
        return self._link.name

    @property
    def service(self) -> str:
        """Name of the server; its address until it has said it."""
        return self._link.service

    @property
    def catalogue(self) -> Mapping[str, tuple[str, int, list[str]]]:
        """What the server offers: name to (interface, API version, methods)."""
        return self._link.catalogue

    @property
    def timeout_s(self) -> float:
        """Deadline of a call that sets none, seconds."""
        return self._timeout_s

    async def open(self) -> None:
        """Connect and shake hands.

        Raises:
            PeerLostError: no server answered within `connect_s`, or it refused our keys.
            ProtocolError: the server belongs to another run.
            WireVersionError: it speaks another wire version.
            ConfigError: the address is not allowed.
        """
        link = self._link
        check_reach(link.address, bind=False, keys=link.keys is not None)
        check_path(link.where, bind=False)
        self._welcome = asyncio.get_running_loop().create_future()
        sock = new_socket(zmq.DEALER, link.where, link.limits, link.heartbeat)
        if link.keys is not None and link.server_key is not None:
            encrypt_client(sock, link.keys, link.server_key)
        self._socket = LoopSocket(sock, link.limits, self._on_message)
        try:
            self._socket.watch(WATCHED, lambda event: self._lose(link.ended(event)))
            sock.connect(link.where)
            self._send(link.hello())
            async with asyncio.timeout(link.connect_s):
                await self._welcome
        except TimeoutError:
            self._socket.close()
            raise link.unanswered() from None
        except BaseException:
            self._socket.close()
            raise

    async def aclose(self) -> None:
        """Say goodbye and close; calls under way fail with `ServiceClosedError`. Idempotent."""
        if self._socket is None or self._socket.closed:
            return
        if self._link.lost is None:
            with contextlib.suppress(BackpressureError):  # it takes nothing, not even a goodbye
                self._send([p.BYE])
            self._lose(ServiceClosedError(f"the client of {self.service!r} was closed"))
        self._socket.close()

    async def __aenter__(self) -> Self:
        """Open."""
        await self.open()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        await self.aclose()

    async def call(
        self,
        method: str,
        arguments: Mapping[str, Any],
        *,
        returns: Any = Any,
        timeout_s: float | None = DEFAULT_TIMEOUT,
    ) -> Any:
        """Call `name.method` and wait for its result.

        Large arrays among the arguments are sent from where they are: leave them alone until the
        call is over.

        Args:
            method: name of the service and the method, with a dot between.
            arguments: by name.
            returns: type of the result.
            timeout_s: deadline; None for none, when only the server's death ends the wait.

        Raises:
            AsyncFlowError: what the handler raised, by its code; `EngineError` for other errors.
            ServiceTimeoutError: the deadline passed; the handler is cancelled.
            PeerLostError: the server is gone; whether it did the work is unknown.
            ServiceClosedError: the client is not open.
            WireDecodeError: the result is not of type `returns`.
            DataError: the arguments cannot be sent.
            ConfigError: the deadline is negative or not a number.
        """
        self._check_usable()
        timeout_s = self._timeout_s if timeout_s == DEFAULT_TIMEOUT else timeout_s
        check_timeout(timeout_s)
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        self._send([p.CALL, number, method, timeout_s, arguments])
        future: asyncio.Future[Any] = loop.create_future()
        self._calls[number] = future
        timer = None
        if timeout_s is not None:
            timer = loop.call_later(timeout_s, self._expire, future, method, timeout_s)
        try:
            value = await future
        except BaseException:
            if number in self._calls:
                self._cancel(number)
            elif not future.cancelled():
                future.exception()  # seen, or asyncio would call it lost
            raise
        finally:
            self._calls.pop(number, None)
            if timer is not None:
                timer.cancel()
        return builder(strict=False).build(returns, value, f"result of {method}")

    async def stream(
        self,
        method: str,
        arguments: Mapping[str, Any],
        *,
        items: Any = Any,
        timeout_s: float | None = DEFAULT_TIMEOUT,
        window: int = p.MAX_WINDOW,
    ) -> AsyncGenerator[Any, None]:
        """Call a method that yields, and yield what it yields.

        Args:
            method: as for `call`.
            arguments: by name.
            items: type of an item.
            timeout_s: longest wait for one item; the time between takes does not count.
            window: most items under way or waiting here, from 1 to 8.

        Raises:
            AsyncFlowError: as `call`.
        """
        self._check_usable()
        timeout_s = self._timeout_s if timeout_s == DEFAULT_TIMEOUT else timeout_s
        check_timeout(timeout_s)
        number = next(self._numbers)
        self._send([p.STREAM, number, method, timeout_s, arguments, window])
        state = self._streams[number] = _Stream()
        build = builder(strict=False).build
        owed, grant = 0, max(1, window // 2)
        try:
            while True:
                if not state.items:
                    if state.ended:
                        break
                    await self._arrival(state, method, timeout_s)
                    continue
                value = state.items.popleft()
                owed += 1
                if owed >= grant and not state.ended and self._link.lost is None:
                    self._send([p.CREDIT, number, owed])
                    owed = 0
                yield build(items, value, f"item of {method}")
            if state.error is not None:
                raise state.error
        finally:
            self._streams.pop(number, None)
            if not state.ended:
                self._cancel(number)

    async def _arrival(self, state: _Stream, method: str, timeout_s: float | None) -> None:
        state.wake = wake = asyncio.get_running_loop().create_future()
        timer = None
        if timeout_s is not None:
            timer = wake.get_loop().call_later(timeout_s, self._expire, wake, method, timeout_s)
        try:
            await wake
        finally:
            state.wake = None
            if timer is not None:
                timer.cancel()

    def _expire(self, future: asyncio.Future[Any], method: str, timeout_s: float) -> None:
        if not future.done():
            future.set_exception(
                ServiceTimeoutError(
                    f"{method}: no answer from {self.service!r} within {timeout_s:g} s",
                    service=self.service,
                )
            )

    def _cancel(self, number: int) -> None:
        if self._link.lost is None:
            try:
                self._send([p.CANCEL, number])
            except BackpressureError:
                logger.warning("%s: a cancellation did not fit", self.service)

    def _check_usable(self) -> None:
        self._link.check()
        if self._socket is None or self._socket.closed or self._welcome is None:
            raise self._link.not_open()

    def _send(self, message: list[Any]) -> None:
        assert self._socket is not None
        parts = self._encoder.encode(message)
        try:
            self._socket.send(parts)
        except zmq.Again:
            raise self._link.stuck() from None

    def _on_message(self, _identity: bytes, header: bytes, frames: list[Buffer]) -> None:
        try:
            match unpack(header, frames, self._link.limits):
                case [p.REPLY, int(number), value]:
                    self._settle(number, value, None)
                case [p.ITEM, int(number), value]:
                    stream = self._streams.get(number)
                    if stream is not None:
                        stream.items.append(value)
                        stream.stir()
                case [p.END, int(number)]:
                    self._settle(number, None, None)
                case [p.ERROR, int(number), str(code), str(text)]:
                    self._settle(number, None, p.rebuild_error(code, text, self.service))
                case other:
                    self._on_session(other)
        except AsyncFlowError as error:
            self._lose(error)

    def _on_session(self, message: Any) -> None:
        self._link.take(message)
        if self._link.welcomed and self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(None)

    def _settle(self, number: int, value: Any, error: AsyncFlowError | None) -> None:
        """End a call or stream; an answer nobody waits for any more is dropped."""
        future = self._calls.pop(number, None)
        if future is not None:
            if future.done():
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
            return
        stream = self._streams.get(number)
        if stream is not None:
            stream.ended, stream.error = True, error
            stream.stir()

    def _lose(self, error: AsyncFlowError) -> None:
        """Fail everything under way, and all that follows."""
        if self._link.lost is not None:
            return
        self._link.lost = error
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(error)
        for number in [*self._calls, *self._streams]:
            self._settle(number, None, self._link.copy_of(error))
