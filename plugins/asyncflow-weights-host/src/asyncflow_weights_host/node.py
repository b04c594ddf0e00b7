"""One process's part in moving versions: it serves what it holds and pulls what it wants.

The publisher sends each byte once. Who asks for a version is appended to its chain and takes the
chunks from the member before, which passes each on as soon as it has it. A member that falls silent
is left out: those behind it take the rest from the publisher.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import zmq

from asyncflow_core.errors import AsyncFlowError, ServiceClosedError, ServiceError
from asyncflow_core.wire import KeyPair
from asyncflow_weights_host.held import Held
from asyncflow_weights_host.protocol import Content, Header, Op
from asyncflow_weights_host.sockets import Sockets

__all__ = ["Node", "Origin"]

_log = logging.getLogger(__name__)

_WINDOW = 16
"""Chunks asked for and not yet there."""
_PARKED = 4096
_TICK_MS = 200


@dataclass(frozen=True, slots=True)
class Origin:
    """Who published a version: the address of its node, the secret and the keys to ask with."""

    address: str
    token: bytes
    keys: KeyPair


@dataclass(slots=True, eq=False)
class _Pull:
    """A version on its way in. `origin` says whom to ask who the parent is."""

    content: Content
    held: Held
    origin: Origin
    changed: Callable[[], None]
    socket: zmq.Socket[bytes] | None = None
    parent: str = ""
    asked: int = 0
    heard_at: float = 0.0


@dataclass(slots=True)
class _Chain:
    """Who pulls a version from whom, in order."""

    members: list[str] = field(default_factory=list)

    def join(self, address: str) -> str:
        """The parent of a new member; empty is the publisher.

        One that comes again is not believed to have what it took before, and whom it could take it
        from may wait for it: it gets it from the publisher.
        """
        if address in self.members:
            return ""
        self.members.append(address)
        return self.members[-2] if len(self.members) > 1 else ""

    def lose(self, address: str) -> None:
        """A member fell silent."""
        if address in self.members:
            self.members.remove(address)


class Node(threading.Thread):
    """Owns all sockets, on its own thread. Public methods may be called from any.

    Once the thread has ended, by `stop` or by a fault, what it was pulling has failed, and what it
    is told raises `ServiceError`: nobody waits for a thread that is no more.
    """

    def __init__(self, sockets: Sockets, address: str, *, stall_s: float) -> None:
        """Bind; `start` answers.

        Args:
            sockets: that it takes over.
            address: to bind.
            stall_s: silence after which a parent is given up.
        """
        super().__init__(name="weights-node", daemon=True)
        self._sockets = sockets
        try:
            self._router, self.address = sockets.server(address)
        except BaseException:
            sockets.close()
            raise
        self._tokens: set[bytes] = set()
        self._stall_s = stall_s
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._telling = threading.Lock()
        self._over = ""
        self._wake = os.eventfd(0)
        self._poller = zmq.Poller()
        self._held: dict[Content, Held] = {}
        self._chains: dict[Content, _Chain] = {}
        self._parked: dict[Content, list[tuple[bytes, int]]] = {}
        self._pulls: dict[Content, _Pull] = {}
        self._running = True
        self.bytes_sent = 0
        self.bytes_received = 0

    def trust(self, origin: Origin) -> None:
        """Answer those who show a publisher's secret, and come with its keys."""
        self._sockets.admit(origin.keys)
        self._tokens.add(origin.token)

    def hold(self, content: Content, held: Held) -> None:
        """Serve what was published here."""
        self._do(lambda: self._on_hold(content, held))

    def drop(self, content: Content) -> None:
        """Serve it no more; who asks is told that it is gone."""
        self._do(lambda: self._on_drop(content))

    def settle(self) -> None:
        """Wait until what was said so far is done."""
        done = threading.Event()
        self._do(done.set)
        done.wait(self._stall_s)

    def pull(
        self, content: Content, held: Held, origin: Origin, changed: Callable[[], None]
    ) -> None:
        """Fill `held`; `changed` is called, on the node's thread, after every buffer."""
        self._do(lambda: self._on_pull(_Pull(content, held, origin, changed)))

    def has(self, content: Content, origin: Origin, timeout_s: float) -> bool | None:
        """Ask a publisher whether it holds a version; None without an answer. Blocks."""
        self._check_running()
        try:
            socket = self._sockets.client(origin.address, origin.keys)
        except zmq.ZMQError as error:
            raise ServiceError(f"{origin.address!r} cannot be reached: {error}") from error
        try:
            socket.send_multipart([Header(Op.HAS, content).pack(), b""])
            if not socket.poll(int(timeout_s * 1000)):
                return None
            header = Header.unpack(socket.recv_multipart()[0])
        except zmq.ContextTerminated:
            return None  # this side was closed meanwhile
        finally:
            socket.close()
        return header is not None and header.op is Op.PARENT

    def stop(self) -> None:
        """End the thread, once, and close everything; pulls under way fail."""
        with contextlib.suppress(ServiceError):
            self._do(lambda: setattr(self, "_running", False))
        self.join()
        os.close(self._wake)

    def _do(self, command: Callable[[], None]) -> None:
        with self._telling:
            self._check_running()
            self._commands.put(command)
            os.eventfd_write(self._wake, 1)

    def _check_running(self) -> None:
        if self._over:
            kind = ServiceError if self._running else ServiceClosedError
            raise kind(f"weights are moved no more: {self._over}", service="weight_sync")

    def run(self) -> None:
        """Answer and ask until stopped."""
        reason = "this side was closed"
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            _log.exception("the thread that moves weights failed")
            reason = f"the thread that moves weights failed: {type(error).__name__}: {error}"
        with self._telling:
            self._over = reason
        while not self._commands.empty():
            self._commands.get()()
        for pull in list(self._pulls.values()):
            self._fail(pull, reason)
        self._router.close()
        self._sockets.close()

    def _work(self) -> None:
        self._poller.register(self._wake, zmq.POLLIN)
        self._poller.register(self._router, zmq.POLLIN)
        while self._running:
            ready = dict(self._poller.poll(_TICK_MS))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            while not self._commands.empty():
                self._commands.get()()
            if self._router in ready:
                self._serve()
            for pull in list(self._pulls.values()):
                if pull.socket in ready:
                    self._receive(pull)
                elif time.monotonic() - pull.heard_at > self._stall_s:
                    self._give_up(pull, f"no byte for {self._stall_s:g} s")

    # What is held

    def _on_hold(self, content: Content, held: Held) -> None:
        self._held[content] = held
        self._chains[content] = _Chain()

    def _on_drop(self, content: Content) -> None:
        self._held.pop(content, None)
        self._chains.pop(content, None)
        for peer, chunk in self._parked.pop(content, []):
            self._answer(peer, content, chunk)

    # Serving

    def _serve(self) -> None:
        while _has_message(self._router):
            try:
                peer, raw, *rest = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return  # its sender went away meanwhile
            header = Header.unpack(raw)
            if header is None or not self._is_trusted(header.content.origin):
                continue  # a stranger: no state, no answer
            who = rest[0].decode("utf-8", "replace") if rest else ""
            if header.op is Op.GET:
                self._answer(peer, header.content, header.chunk)
            elif header.op in (Op.JOIN, Op.LOST, Op.HAS):
                self._assign(peer, header, who)

    def _is_trusted(self, token: bytes) -> bool:
        return any(hmac.compare_digest(token, known) for known in self._tokens)

    def _answer(self, peer: bytes, content: Content, chunk: int) -> None:
        """Send a chunk now or once it is there, or say that it is gone."""
        held = self._held.get(content)
        if held is None or held.failed or chunk >= held.chunks:
            self._send(peer, Header(Op.GONE, content, chunk))
        elif chunk < held.landed:
            data = held.chunk(chunk)
            if self._send(peer, Header(Op.CHUNK, content, chunk), data):
                self.bytes_sent += len(data)
        else:
            parked = self._parked.setdefault(content, [])
            if len(parked) < _PARKED:
                parked.append((peer, chunk))

    def _assign(self, peer: bytes, header: Header, who: str) -> None:
        chain = self._chains.get(header.content)
        if chain is None:
            self._send(peer, Header(Op.GONE, header.content))
            return
        parent = ""
        if header.op is Op.JOIN:
            parent = chain.join(who)
        elif header.op is Op.LOST:
            chain.lose(who)
        self._send(peer, Header(Op.PARENT, header.content), parent.encode())

    def _send(self, peer: bytes, header: Header, data: Any = b"") -> bool:
        try:
            self._router.send_multipart([peer, header.pack(), data], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            return False  # it is gone, or its queue is full: it will hear nothing and give us up
        return True

    def _unpark(self, content: Content) -> None:
        for peer, chunk in self._parked.pop(content, []):
            self._answer(peer, content, chunk)

    # Pulling

    def _on_pull(self, pull: _Pull) -> None:
        running = self._pulls.pop(pull.content, None)
        if running is not None:
            self._fail(running, "it was started again")
        self._held[pull.content] = pull.held
        self._pulls[pull.content] = pull
        if self._over:
            return  # it fails with the others
        self._connect(pull, pull.origin.address)
        self._ask(pull, Op.JOIN, self.address.encode())

    def _connect(self, pull: _Pull, address: str) -> None:
        self._disconnect(pull)
        pull.parent, pull.asked = address, pull.held.landed
        pull.heard_at = time.monotonic()
        try:
            pull.socket = self._sockets.client(address, pull.origin.keys)
        except (AsyncFlowError, zmq.ZMQError) as error:
            # An address that is none, or no descriptors left: a fault of this pull alone.
            self._give_up(pull, f"it cannot be reached: {error}")
            return
        self._poller.register(pull.socket, zmq.POLLIN)

    def _disconnect(self, pull: _Pull) -> None:
        if pull.socket is not None:
            self._poller.unregister(pull.socket)
            pull.socket.close()
            pull.socket = None

    def _ask(self, pull: _Pull, op: Op, what: bytes = b"", chunk: int = 0) -> None:
        if pull.socket is None:
            return  # it has failed
        header = Header(op, pull.content, chunk)
        pull.socket.send_multipart([header.pack(), what])

    def _receive(self, pull: _Pull) -> None:
        socket = pull.socket
        while socket is not None and socket is pull.socket and _has_message(socket):
            try:
                header = Header.unpack(socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return  # its sender went away meanwhile
            if header is None or header.content != pull.content or not socket.get(zmq.RCVMORE):
                self._give_up(pull, "it sent something else")
            elif header.op is Op.CHUNK:
                self._take_chunk(pull, header.chunk)
            elif header.op is Op.PARENT:
                self._follow(pull, socket.recv().decode("utf-8", "replace"))
            else:
                self._give_up(pull, "it does not hold that version any more")

    def _follow(self, pull: _Pull, parent: str) -> None:
        if parent and parent != pull.parent:
            self._connect(pull, parent)
        pull.heard_at = time.monotonic()
        self._ask_more(pull)
        self._finish_if_complete(pull)

    def _ask_more(self, pull: _Pull) -> None:
        while pull.asked < min(pull.held.chunks, pull.held.landed + _WINDOW):
            self._ask(pull, Op.GET, chunk=pull.asked)
            pull.asked += 1

    def _take_chunk(self, pull: _Pull, number: int) -> None:
        assert pull.socket is not None
        target: Any = pull.held.chunk(number) if number == pull.held.landed else None
        if target is None or pull.socket.recv_into(target) != len(target):
            self._give_up(pull, "it sent another chunk than it was asked for")
            return
        self.bytes_received += len(target)
        pull.held.landed += 1
        pull.heard_at = time.monotonic()
        self._ask_more(pull)
        self._unpark(pull.content)
        if pull.held.at_an_end():
            pull.changed()
        self._finish_if_complete(pull)

    def _finish_if_complete(self, pull: _Pull) -> None:
        if pull.held.complete:
            self._disconnect(pull)
            self._pulls.pop(pull.content, None)
            pull.changed()

    def _give_up(self, pull: _Pull, reason: str) -> None:
        """Leave a parent; without the publisher itself there is nobody left to ask."""
        lost = pull.parent
        if lost == pull.origin.address:
            self._fail(pull, f"its publisher at {lost.partition('|')[0]} is lost: {reason}")
            return
        self._connect(pull, pull.origin.address)
        self._ask(pull, Op.LOST, lost.encode())

    def _fail(self, pull: _Pull, reason: str) -> None:
        self._disconnect(pull)
        if self._pulls.get(pull.content) is pull:
            self._pulls.pop(pull.content)
        pull.held.failed = reason
        self._unpark(pull.content)
        pull.changed()


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)
