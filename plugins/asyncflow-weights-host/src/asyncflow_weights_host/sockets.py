"""ZeroMQ sockets with our options: private, bounded, and encrypted beyond this machine."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import socket as unix
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from asyncflow_core.errors import ConfigError
from asyncflow_core.wire import KeyPair, check_reach, is_ipv6, is_local, split_key, with_key
from asyncflow_weights_host.held import CHUNK_BYTES

__all__ = ["Sockets", "socket_name", "sweep_sockets"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SMALL_BYTES = 4096
_QUEUED = 256
_DOMAIN = "asyncflow"


def socket_name() -> str:
    """A file name for a socket of this process."""
    return f"weights-{os.getpid()}-{secrets.token_hex(4)}.sock"


def sweep_sockets(directory: Path) -> None:
    """Remove the sockets of dead processes.

    Nobody must listen, and the process of the name be gone: one that binds does not listen yet, and
    that of another container is not seen from here.
    """
    for path in directory.glob("weights-*-*.sock"):
        pid = path.name.split("-")[1]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM | unix.SOCK_NONBLOCK) as probe:
                if probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED:
                    path.unlink(missing_ok=True)


class Sockets:
    """The sockets of one node, in a context of their own.

    An address that leaves this machine is served with CURVE, and only admitted keys are let in.
    All are made for the run: a publisher's client pair goes with its locators, over the control
    plane, so that whoever may fetch has it. Such an address is written `tcp://HOST:PORT#KEY`.
    """

    def __init__(self) -> None:
        """Make the context."""
        _keep_message_memory()
        self._context: zmq.Context[Any] = zmq.Context()
        self._admitted = _Admitted()
        self._authenticator: ThreadAuthenticator | None = None
        self._file: Path | None = None

    def admit(self, keys: KeyPair) -> None:
        """Let clients with these keys in."""
        self._admitted.keys.add(keys.public)

    def server(self, address: str) -> tuple[zmq.Socket[bytes], str]:
        """A bound ROUTER, and the address under which others reach it."""
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.IPV6, int(is_ipv6(address)))
        socket.setsockopt(zmq.MAXMSGSIZE, _SMALL_BYTES)
        socket.set_hwm(_QUEUED)
        socket.linger = 0
        keys = None if is_local(address) else self._encrypt(socket)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"cannot bind {address!r}: {error}") from error
        bound = socket.get_string(zmq.LAST_ENDPOINT)
        if bound.startswith("ipc://"):
            self._file = Path(bound.removeprefix("ipc://"))  # libzmq leaves it where it is
        return socket, bound if keys is None else with_key(bound, keys.public)

    def _encrypt(self, socket: zmq.Socket[bytes]) -> KeyPair:
        keys = KeyPair.new()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, self._admitted)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        # Without this an authenticator that ended would let everybody in.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        return keys

    def client(self, address: str, keys: KeyPair) -> zmq.Socket[bytes]:
        """A DEALER that connects; `keys` are used where the way is encrypted."""
        where, public = split_key(address)
        check_reach(address, bind=False, keys=public is not None)
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, int(is_ipv6(where)))
        socket.setsockopt(zmq.MAXMSGSIZE, CHUNK_BYTES + _SMALL_BYTES)
        socket.set_hwm(_QUEUED)
        socket.linger = 0
        try:
            if public is not None:
                socket.curve_serverkey = public
                socket.curve_publickey = keys.public
                socket.curve_secretkey = keys.secret
            socket.connect(where)
        except BaseException:
            socket.close()  # an open one would keep the context from ending
            raise
        return socket

    def close(self) -> None:
        """End the context; every socket must be closed."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def _keep_message_memory() -> None:
    """Let the memory of a message be used for the next, instead of going back to the kernel.

    libzmq allocates each message, and touching fresh pages costs more than the copy into them: 0.19
    instead of 0.3 s of CPU for 0.5 GB, of which a plain socket takes 0.18. The values are those at
    which glibc arrives by itself once a process has freed a block of 32 MiB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


class _Admitted:
    """The public keys that are let in."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client may connect."""
        del domain
        return z85.decode(key) in self.keys
