"""The serving side of the wire."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Collection, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self

import zmq

from asyncflow_core.errors import (
    AsyncFlowError,
    BackpressureError,
    ConfigError,
    ProtocolError,
    ServiceClosedError,
    ServiceError,
    ServiceTimeoutError,
    WireDecodeError,
    WireVersionError,
)
from asyncflow_core.wire import _protocol as p
from asyncflow_core.wire._calls import (
    Method,
    Peer,
    Running,
    arguments_of,
    cancel,
    start_timer,
    stop_timer,
    window_of,
)
from asyncflow_core.wire._gate import Gate, encrypt_server
from asyncflow_core.wire._socket import Heartbeat, LoopSocket, new_socket
from asyncflow_core.wire.addresses import check_path, check_reach, with_key
from asyncflow_core.wire.codec import Buffer, Encoder, unpack
from asyncflow_core.wire.keys import KeyPair
from asyncflow_core.wire.limits import Limits

__all__ = ["Server"]

logger = logging.getLogger(__name__)

# What may come from somebody who has not shown the token.
_HELLO_LIMITS = Limits(header_bytes=4096, frames=0, total_bytes=4096, depth=2, items=16)


class Server:
    """Answers calls and streams of many clients at one address.

    Owns its socket and a task a call. All on one event loop; a handler that blocks it delays every
    client, though none takes the server for dead. Calls of a client run concurrently, in no order.
    When a client cancels, a deadline passes or a client dies, the handler is cancelled.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        token: str,
        limits: Limits | None = None,
        heartbeat: Heartbeat | None = None,
        keys: KeyPair | None = None,
        allow: Collection[bytes] = (),
    ) -> None:
        """Keep the settings.

        Args:
            address: ipc://PATH in a directory of mode 0700, or tcp://127.0.0.1:PORT, * for any;
                with keys also tcp://HOST:PORT or tcp://INTERFACE:PORT.
            name: of this process in the run, as errors name it.
            token: secret of the run; clients without it are refused.
            limits: bounds of a message.
            heartbeat: when a silent client counts as gone.
            keys: the server's pair; its connections are encrypted then.
            allow: public keys that are let in, beside the server's own.

        Raises:
            ConfigError: no token; keys without an allow-list, or the other way round.
        """
        if not token:
            raise ConfigError("a server needs the token of its run, got an empty one")
        if (keys is None) != (not allow):
            given, missing = ("keys", "allow-list") if keys else ("an allow-list", "keys")
            raise ConfigError(
                f"the server {name!r} was given {given} and no {missing}; one has no effect "
                "without the other: give both, or neither for an address on this machine"
            )
        self.name = name
        self._keys = keys
        self._allow = frozenset(allow)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._gate: Gate | None = None
        self._address = self._bound = address
        self._token = token.encode()
        self._limits = limits or Limits()
        self._heartbeat = heartbeat or Heartbeat()
        self._encoder = Encoder(self._limits)
        self._methods: dict[str, Method] = {}
        self._catalogue: dict[str, tuple[str, int, list[str]]] = {}
        self._socket: LoopSocket | None = None
        self._peers: dict[bytes, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._probe_timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._receive = {
            p.CALL: self._on_call,
            p.STREAM: self._on_call,
            p.CREDIT: self._on_credit,
            p.CANCEL: self._on_cancel,
            p.BYE: self._on_bye,
        }

    @property
    def address(self) -> str:
        """Where clients connect; after `open()` with the real port, and the key if it has one."""
        return self._address

    def expose(
        self, name: str, methods: Mapping[str, Method], *, interface: str = "", api_version: int = 0
    ) -> None:
        """Offer methods as `name.method`; before `open()`, since clients get the list on arrival.

        Raises:
            ConfigError: the name is taken, or the server is open.
        """
        if name in self._catalogue or self._socket is not None:
            reason = "the server is open" if self._socket else "the name is taken"
            raise ConfigError(f"{name!r} cannot be served by {self.name!r}: {reason}")
        self._catalogue[name] = (interface, api_version, sorted(methods))
        self._methods.update({f"{name}.{key}": method for key, method in methods.items()})

    async def open(self) -> None:
        """Bind and answer.

        Raises:
            ConfigError: the address is not allowed or cannot be bound.
        """
        check_reach(self._address, bind=True, keys=self._keys is not None)
        check_path(self._address, bind=True)
        if self._keys is not None:
            # Of its own: a context has one gate.
            self._context = zmq.Context()
            self._gate = Gate(self._context, self._allow | {self._keys.public})
        sock = new_socket(zmq.ROUTER, self._address, self._limits, self._heartbeat, self._context)
        try:
            if self._keys is not None:
                encrypt_server(sock, self._keys)
            sock.bind(self._address)
        except zmq.ZMQError as error:
            sock.close(0)
            await self._close_gate()
            raise ConfigError(f"server {self.name!r} cannot bind {self._address!r}: {error}") from (
                error
            )
        self._bound = sock.get_string(zmq.LAST_ENDPOINT)
        keys = self._keys
        self._address = self._bound if keys is None else with_key(self._bound, keys.public)
        self._socket = LoopSocket(sock, self._limits, self._on_message)
        self._schedule_probe()

    async def aclose(self) -> None:
        """Cancel and await every handler, say goodbye, close. Idempotent."""
        if self._socket is None or self._socket.closed:
            return
        self._closing = True
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        goodbye = ServiceClosedError(f"the server {self.name!r} has closed")
        for peer in list(self._peers.values()):
            self._end(peer, goodbye)
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._socket.unbind(self._bound)
        self._socket.close()
        await self._close_gate()

    async def _close_gate(self) -> None:
        if self._gate is not None and self._context is not None:
            self._gate.close()
            # It waits until the last goodbyes have left.
            await asyncio.to_thread(self._context.term)

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

    def probe(self, name: str | None = None) -> None:
        """Find out now which clients (of that name) are gone."""
        for peer in list(self._peers.values()):
            if name in (None, peer.name):
                self._send(peer, [p.NOOP])

    # Receiving

    def _on_message(self, identity: bytes, header: bytes, frames: list[Buffer]) -> None:
        if self._closing:
            return  # who comes now learns of the end from its connection; work would prolong it
        peer = self._peers.get(identity)
        if peer is None:
            self._on_stranger(identity, header, frames)
            return
        try:
            match unpack(header, frames, self._limits):
                case [int(kind), *fields] if kind in self._receive:
                    self._receive[kind](peer, fields)
                case _:
                    raise WireDecodeError("a message is of no known kind")
        except WireDecodeError as error:
            logger.warning("%s: client %s is cut off: %s", self.name, peer.name, error)
            self._end(peer, error)

    def _on_stranger(self, identity: bytes, header: bytes, frames: list[Buffer]) -> None:
        """A handshake, or nothing: who has not shown the token costs no state, answer or log."""
        try:
            message = unpack(header, frames, _HELLO_LIMITS)
        except WireDecodeError as error:
            logger.debug("%s: a stranger's message is ignored: %s", self.name, error)
            return
        match message:
            case [p.HELLO, int(version), str(token), str(name), *_]:
                pass
            case _:
                logger.debug("%s: a message without a handshake is ignored", self.name)
                return
        refusal: ProtocolError | None = None
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self._token):
            refusal = ProtocolError(
                f"client {name!r} has not the token of the run to which the server {self.name!r} "
                "belongs; it was started for another run, or its token was not handed on"
            )
        elif version != p.WIRE_VERSION:
            older = "client" if version < p.WIRE_VERSION else "server"
            refusal = WireVersionError(
                f"client {name!r} speaks wire version {version} and the server {self.name!r} "
                f"{p.WIRE_VERSION}; upgrade asyncflow-core on the side of the {older}"
            )
        peer = Peer(identity, name)
        if refusal is not None:
            logger.warning("%s: refused: %s", self.name, refusal)
            self._send(peer, [p.GOODBYE, *p.error_fields(refusal)])
            return
        self.probe(name)
        self._peers[identity] = peer
        self._send(peer, [p.WELCOME, p.WIRE_VERSION, self.name, self._catalogue])

    def _on_call(self, peer: Peer, fields: list[Any]) -> None:
        match fields:
            case [int(number), str(name), None | float() | int() as timeout_s, dict(plain), *rest]:
                pass
            case _:
                raise WireDecodeError("a call is malformed")
        if number in peer.running or (timeout_s is not None and not timeout_s >= 0):
            raise WireDecodeError(f"call {number} is under way already, or its timeout is negative")
        method = self._methods.get(name)
        try:
            if method is None:
                raise ServiceError(f"no method {name!r} (there are: {sorted(self._methods)})")
            if method.streams != bool(rest):
                raise ServiceError("it yields items" if method.streams else "it yields no items")
            if len(peer.running) >= p.MAX_CALLS:
                raise BackpressureError(
                    f"client {peer.name!r} has {p.MAX_CALLS} calls under way, no more are allowed"
                )
            arguments = arguments_of(method, plain)
        except Exception as error:  # noqa: BLE001  crosses to the caller, who would wait else
            self._send_error(peer, number, name if method else "", error)
            return
        if method.takes_peer:
            arguments["peer"] = peer
        if method.inline:
            waiting = self._answer(peer, number, name, method, arguments)
            if waiting is None:
                return
            method, arguments = Method(lambda: waiting, method.arguments), {}
        self._start(peer, number, Running(timeout_s), name, method, arguments, rest)

    def _answer(
        self, peer: Peer, number: int, name: str, method: Method, arguments: dict[str, Any]
    ) -> Coroutine[Any, Any, Any] | None:
        """Answer an inline call, or return what it waits for."""
        try:
            value = method.function(**arguments)
            if asyncio.iscoroutine(value):
                return value
            self._send(peer, [p.REPLY, number, value])
        except Exception as error:  # noqa: BLE001  crosses to the caller
            self._send_error(peer, number, name, error)
        return None

    def _start(
        self,
        peer: Peer,
        number: int,
        running: Running,
        name: str,
        method: Method,
        arguments: dict[str, Any],
        rest: list[Any],
    ) -> None:
        """Go on with a call in a task of its own."""
        peer.running[number] = running
        if method.streams:
            running.credit = window_of(rest)
            work = self._stream(peer, number, running, name, method, arguments)
        else:
            work = self._call(peer, number, running, name, method, arguments)
            start_timer(running)
        running.task = task = asyncio.create_task(work, name=name)
        asyncio.get_running_loop().call_soon(setattr, running, "begun", True)
        self._tasks.add(task)

        # Not in the coroutine: one that is cancelled before its first step never runs at all.
        def finish(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            stop_timer(running)
            peer.running.pop(number, None)

        task.add_done_callback(finish)

    def _on_credit(self, peer: Peer, fields: list[Any]) -> None:
        match fields:
            case [int(number), int(items)] if items > 0:
                pass
            case _:
                raise WireDecodeError("a credit is malformed")
        running = peer.running.get(number)
        if running is None:
            return
        running.credit += items
        if running.credit > p.MAX_WINDOW:
            raise WireDecodeError(f"a stream has credit for more than {p.MAX_WINDOW} items")
        if running.wake is not None and not running.wake.done():
            running.wake.set_result(None)

    def _on_cancel(self, peer: Peer, fields: list[Any]) -> None:
        match fields:
            case [int(number)]:
                running = peer.running.get(number)
            case _:
                raise WireDecodeError("a cancellation is malformed")
        if running is not None:
            cancel(running, "cancelled")

    def _on_bye(self, peer: Peer, _fields: list[Any]) -> None:
        self._end(peer, None)

    # Working

    async def _call(
        self,
        peer: Peer,
        number: int,
        running: Running,
        name: str,
        method: Method,
        arguments: dict[str, Any],
    ) -> None:
        try:
            value = await method.function(**arguments)
            self._send(peer, [p.REPLY, number, value])
        except asyncio.CancelledError:
            self._send_cancelled(peer, number, running, name)
        except Exception as error:  # noqa: BLE001  crosses to the caller
            self._send_error(peer, number, name, error)

    async def _stream(
        self,
        peer: Peer,
        number: int,
        running: Running,
        name: str,
        method: Method,
        arguments: dict[str, Any],
    ) -> None:
        """The deadline is for each item; waiting for a slow reader does not count."""
        iterator = None
        try:
            iterator = aiter(method.function(**arguments))
            while True:
                await self._credit(running)
                start_timer(running)
                item = await anext(iterator)
                stop_timer(running)
                # Copied, as a generator may use its buffers again once it is asked for the next.
                self._send(peer, [p.ITEM, number, item], copy=True)
        except StopAsyncIteration:
            self._send(peer, [p.END, number])
        except asyncio.CancelledError:
            self._send_cancelled(peer, number, running, name)
        except Exception as error:  # noqa: BLE001  crosses to the caller
            self._send_error(peer, number, name, error)
        finally:
            stop_timer(running)
            await self._close_iterator(iterator, name)

    async def _close_iterator(self, iterator: Any, name: str) -> None:
        close = getattr(iterator, "aclose", None)
        if close is None:
            return
        try:
            await close()
        except Exception:
            logger.exception("%s: closing the stream %s failed", self.name, name)

    async def _credit(self, running: Running) -> None:
        while running.credit <= 0:
            running.wake = asyncio.get_running_loop().create_future()
            try:
                await running.wake
            finally:
                running.wake = None
        running.credit -= 1

    # Sending

    def _send(self, peer: Peer, message: list[Any], *, copy: bool = False) -> None:
        """Send, or notice that the peer is gone.

        Raises:
            DataError: the message cannot be encoded.
        """
        if self._socket is None or self._socket.closed:
            return
        parts = self._encoder.encode(message)
        try:
            self._socket.send([peer.identity, *parts], copy=copy)
        except zmq.ZMQError as error:
            if peer.alive and self._peers.get(peer.identity) is peer:
                logger.info("%s: client %s is gone: %s", self.name, peer.name, error)
                self._end(peer, None)

    def _send_cancelled(self, peer: Peer, number: int, running: Running, name: str) -> None:
        if running.why == "timeout":
            error = ServiceTimeoutError(f"no result within {running.timeout_s:g} s")
            self._send_error(peer, number, name, error)
        elif not running.why:
            # The handler was cancelled by something inside the service.
            self._send_error(peer, number, name, ServiceError("the call was cancelled inside"))

    def _send_error(self, peer: Peer, number: int, name: str, error: Exception) -> None:
        if not isinstance(error, AsyncFlowError):
            logger.error("%s: %s failed", self.name, name, exc_info=error)
        code, message = p.error_fields(error)
        self._send(peer, [p.ERROR, number, code, f"{name}: {message}" if name else message])

    def _end(self, peer: Peer, reason: AsyncFlowError | None) -> None:
        """Cut a client off; it is ignored until it shakes hands again."""
        if self._peers.pop(peer.identity, None) is None:
            return
        peer.alive = False
        if reason is not None:
            self._send(peer, [p.GOODBYE, *p.error_fields(reason)])
        for running in list(peer.running.values()):
            cancel(running, "cancelled")

    def _schedule_probe(self) -> None:
        # ROUTER_MANDATORY answers a send to a dead client with an error, and nothing else tells
        # a ROUTER of its death.
        self.probe()
        self._probe_timer = asyncio.get_running_loop().call_later(
            self._heartbeat.interval_s, self._schedule_probe
        )
