"""ZeroMQ sockets with our options: private, bounded, and encrypted beyond this machine."""

from __future__ import annotations

import ctypes
import ipaddress
import urllib.parse
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from asyncflow_core.errors import ConfigError
from asyncflow_weights_host.held import CHUNK_BYTES

__all__ = ["Keys", "Sockets", "is_private"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SMALL_BYTES = 4096
_QUEUED = 256


@dataclass(frozen=True, slots=True)
class Keys:
    """A CURVE key pair, Z85."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> Keys:
        """A fresh pair."""
        return cls(*zmq.curve_keypair())


def is_private(address: str) -> bool:
    """Whether only this machine reaches an address: ipc, or tcp on loopback."""
    if address.startswith("ipc://"):
        return True
    if not address.startswith("tcp://"):
        raise ConfigError(f"the address {address!r} is neither ipc://PATH nor tcp://HOST:PORT")
    host = urllib.parse.urlsplit(address.replace(":*", ":0")).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Sockets:
    """The sockets of one node, in a context of their own.

    An address that leaves this machine is served with CURVE, and only admitted keys are let in.
    A publisher's goes with its locators, over the control plane: whoever may fetch has it. Such an
    address is written `tcp://HOST:PORT|PUBLIC`.
    """

    def __init__(self) -> None:
        """Make the context."""
        _keep_message_memory()
        self._context: zmq.Context[Any] = zmq.Context()
        self._admitted = _Admitted()
        self._authenticator: ThreadAuthenticator | None = None

    def admit(self, keys: Keys) -> None:
        """Let clients with these keys in."""
        self._admitted.keys.add(keys.public)

    def server(self, address: str) -> tuple[zmq.Socket[bytes], str]:
        """A bound ROUTER, and the address under which others reach it."""
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, _SMALL_BYTES)
        socket.set_hwm(_QUEUED)
        socket.linger = 0
        suffix = "" if is_private(address) else self._encrypt(socket)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(f"cannot bind {address!r}: {error}") from error
        return socket, socket.get_string(zmq.LAST_ENDPOINT) + suffix

    def _encrypt(self, socket: zmq.Socket[bytes]) -> str:
        keys = Keys.new()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self._admitted)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        return f"|{keys.public.decode()}"

    def client(self, address: str, keys: Keys) -> zmq.Socket[bytes]:
        """A DEALER that connects; `keys` are used where the way is encrypted."""
        address, _, public = address.partition("|")
        if not is_private(address) and not public:
            raise ConfigError(f"the address {address!r} leaves this machine without a key")
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.MAXMSGSIZE, CHUNK_BYTES + _SMALL_BYTES)
        socket.set_hwm(_QUEUED)
        socket.linger = 0
        if public:
            socket.curve_serverkey = public.encode()
            socket.curve_publickey = keys.public
            socket.curve_secretkey = keys.secret
        socket.connect(address)
        return socket

    def close(self) -> None:
        """End the context; every socket must be closed."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


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
        return key in self.keys
