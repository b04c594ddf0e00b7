"""The controller's end of the lane; see `lane.py`."""

from __future__ import annotations

import asyncio
import functools
import hmac
import inspect
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from asyncflow_core.errors import (
    AsyncFlowError,
    BackpressureError,
    ConfigError,
    EngineError,
    ProtocolError,
    ServiceError,
    WireDecodeError,
)
from asyncflow_core.wire import WIRE_VERSION, Buffer, Encoder, Limits, Peer, decode
from asyncflow_store_zmq.handouts import Later
from asyncflow_store_zmq.lane import CHUNK, HELLO_LIMITS, MAX_PARTS, Inbox, framed

__all__ = ["LaneServer"]

_log = logging.getLogger(__name__)
_CALL = [int, str, list]
_MAX_CALLS = 1024
_MAX_WAITING_BYTES = 256 << 20
"""Answers a client may leave unread."""
_PAUSE_S = 1.0
"""Without looking at who wants in, when there is no descriptor for anybody."""

Answer = Callable[[list[Any], Peer], Any]


class LaneServer:
    """Answers calls at a socket's path. All on one event loop, without tasks where it can."""

    def __init__(self, path: Path | None, *, token: str, methods: Mapping[str, Answer]) -> None:
        """Prepare; `open` listens.

        Args:
            path: of the socket, in a directory that is nobody else's; None: only `connect`.
            token: secret of the store.
            methods: name to what answers it: with a value, with a `Later`, or with a
                coroutine that gives it later, which gets a task.
        """
        self._path = path
        self._methods = methods
        self._token = token.encode()
        self._listener: socket.socket | None = None
        self._connections: set[_Connection] = set()

    async def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: the path cannot be used.
        """
        assert self._path is not None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._path.unlink(missing_ok=True)  # of who ended without a word
            listener.bind(str(self._path))
            os.chmod(self._path, 0o600)
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise ConfigError(f"the store cannot listen at {self._path}: {error}") from error
        self._listener = listener
        self._listen()

    def connect(self) -> socket.socket:
        """The client's end of a connection within this process."""
        here, there = socket.socketpair()
        self._let_in(here)
        return there

    async def aclose(self) -> None:
        """Cut everybody off. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None and self._path is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
            self._path.unlink(missing_ok=True)
        tasks = [task for one in self._connections for task in one.tasks]
        for connection in list(self._connections):
            connection.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of descriptors; who wants in stays there, and ready
            _log.warning("a client cannot be let in now: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(_PAUSE_S, self._listen)
            return
        self._let_in(sock)

    def _let_in(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._connections.add(
            _Connection(sock, self._methods, self._token, self._connections.discard)
        )


class _Connection:
    """One client."""

    def __init__(
        self,
        sock: socket.socket,
        methods: Mapping[str, Answer],
        token: bytes,
        ended: Callable[[_Connection], None],
    ) -> None:
        self._sock = sock
        self._methods = methods
        self._token = token
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox(HELLO_LIMITS)
        self._encoder = Encoder()
        self._unsent = bytearray()
        self._answers: list[Buffer] | None = None  # while messages are taken, to leave together
        self._peer: Peer | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self._laters: set[Later] = set()
        self._loop.add_reader(sock, self._readable)

    def close(self) -> None:
        """The client is gone, or has to go."""
        if self._sock.fileno() < 0:
            return
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        if self._peer is not None:
            self._peer.alive = False
        for task in self.tasks:  # not before their first step, or what they hold is never let go
            self._loop.call_soon(task.cancel)
        for later in self._laters:
            later.cancel()
        self._ended(self)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._inbox.add(data)
        self._answers = []
        try:
            while self._sock.fileno() >= 0 and (parts := self._inbox.take()) is not None:
                self._take(decode(parts, limits=self._inbox.limits))
        except WireDecodeError as error:
            name = "a stranger" if self._peer is None else f"client {self._peer.name}"
            _log.warning("store: %s is cut off: %s", name, error)
            self.close()
        finally:
            answers, self._answers = self._answers, None
            if answers:
                self._write(answers)

    def _take(self, message: Any) -> None:
        if self._peer is None:
            self._greet(message)
            return
        if type(message) is not list or list(map(type, message)) != _CALL:
            raise WireDecodeError("a call is malformed")
        number, name, arguments = message
        try:
            method = self._methods.get(name)
            if method is None:
                raise ServiceError(f"no method {name!r} (there are: {sorted(self._methods)})")
            if len(self.tasks) + len(self._laters) >= _MAX_CALLS:
                raise BackpressureError(
                    f"client {self._peer.name!r} has {_MAX_CALLS} calls under way, no more are "
                    f"allowed"
                )
            value = method(arguments, self._peer)
            if isinstance(value, Later):
                self._laters.add(value)
                value.then(functools.partial(self._told, value, number, name))
                return
            if not inspect.iscoroutine(value):
                self._send([number, value])
                return
        except Exception as error:  # noqa: BLE001 - crosses to the caller
            self._send_error(number, name, error)
            return
        task = self._loop.create_task(self._later(number, name, value))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _greet(self, message: Any) -> None:
        match message:
            case [int(version), str(token), str(name)]:
                pass
            case _:
                raise WireDecodeError("a handshake is malformed")
        refusal: AsyncFlowError | None = None
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self._token):
            refusal = ProtocolError(
                f"client {name!r} has not the token of this store; it was started for another "
                f"run, or its token was not handed on"
            )
        elif version != WIRE_VERSION:
            refusal = ProtocolError(
                f"client {name!r} speaks wire version {version} and the store {WIRE_VERSION}; "
                f"upgrade the older one"
            )
        if refusal is not None:
            _log.warning("store: refused: %s", refusal)
            self._write(framed(self._encoder.encode([refusal.code, str(refusal)])))
            self.close()
            return
        self._peer = Peer(b"", name)
        self._inbox.limits = Limits()
        self._send([WIRE_VERSION])

    async def _later(self, number: int, name: str, value: Coroutine[Any, Any, Any]) -> None:
        try:
            self._send([number, await value])
        except Exception as error:  # noqa: BLE001 - crosses to the caller
            self._send_error(number, name, error)

    def _told(
        self, later: Later, number: int, name: str, value: Any, error: Exception | None
    ) -> None:
        """An answer that was waited for."""
        self._laters.discard(later)
        if error is not None:
            self._send_error(number, name, error)
            return
        try:
            self._send([number, value])
        except AsyncFlowError as failure:  # it cannot be sent
            self._send_error(number, name, failure)

    def _send_error(self, number: int, name: str, error: Exception) -> None:
        if isinstance(error, AsyncFlowError):
            self._send([number, error.code, f"store.{name}: {error}"])
            return
        _log.error("store.%s failed", name, exc_info=error)
        text = f"store.{name}: {type(error).__name__}: {error}"
        self._send([number, EngineError.code, text])

    def _send(self, message: list[Any]) -> None:
        # Known: what clients chose came in a message that was as deep, and was let in.
        parts = framed(self._encoder.encode(message, known=True))
        if self._answers is None:
            self._write(parts)
        else:
            self._answers += parts

    def _write(self, parts: list[Buffer]) -> None:
        """Send what the socket takes now; the rest follows."""
        if self._sock.fileno() < 0:
            return
        if len(parts) > MAX_PARTS:
            parts = [b"".join(parts)]
        sent = 0
        if not self._unsent:
            try:
                sent = self._sock.sendmsg(parts)
            except (BlockingIOError, InterruptedError):
                pass
            except ConnectionError:
                self.close()
                return
            if sent == sum(map(len, parts)):
                return
            self._loop.add_writer(self._sock, self._writable)
        self._unsent += b"".join(parts)[sent:]
        if len(self._unsent) > _MAX_WAITING_BYTES:
            _log.warning("store: a client reads none of its answers and is cut off")
            self.close()

    def _writable(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._sock)
