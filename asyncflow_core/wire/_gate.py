"""Encryption of a socket, and the gate of those that listen: who is let in, by key.

libzmq asks a handler in the socket's context about each client that has proved to hold a key
(ZAP, ZeroMQ RFC 27). It asks before a byte of the client's is framed, and lets nobody in while no
handler answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

import zmq

from asyncflow_core.wire.keys import KeyPair

__all__ = ["Gate", "encrypt_client", "encrypt_server"]

logger = logging.getLogger(__name__)

_PLACE = "inproc://zeromq.zap.01"
_DOMAIN = b"asyncflow"
_FIELDS = 7  # version, request, domain, address, identity, mechanism, key


def encrypt_client(sock: zmq.Socket[bytes], keys: KeyPair, server: bytes) -> None:
    """Connect with `keys`, and only to the holder of the public key `server`."""
    sock.curve_publickey, sock.curve_secretkey = keys.public, keys.secret
    sock.curve_serverkey = server


def encrypt_server(sock: zmq.Socket[bytes], keys: KeyPair) -> None:
    """Take only clients that the gate of the context lets in."""
    sock.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    # Without this a missing gate would let everybody in.
    sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    sock.curve_server = True
    sock.curve_publickey, sock.curve_secretkey = keys.public, keys.secret


class Gate:
    """Answers for one context, on the running loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Collection[bytes]) -> None:
        """Open, for the holders of the `allowed` public keys."""
        self._allowed = frozenset(allowed)
        self._sock: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._sock.linger = 0
        self._sock.bind(_PLACE)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(int(self._sock.FD), self._ready)

    def close(self) -> None:
        """Let nobody in any more; after the sockets that it guards."""
        self._loop.remove_reader(int(self._sock.FD))
        self._sock.close()

    def _ready(self) -> None:
        # The descriptor signals changes only: take all that has come.
        while not self._sock.closed and int(self._sock.get(zmq.EVENTS)) & zmq.POLLIN:
            request = self._sock.recv_multipart(zmq.NOBLOCK)
            if len(request) != _FIELDS:  # only libzmq itself can ask here
                logger.error("a handshake of %d fields is refused", len(request))
                request = [b"1.0", b"", b"", b"", b"", b"", b""]
            version, number, domain, address, _, mechanism, key = request
            known = domain == _DOMAIN and mechanism == b"CURVE" and key in self._allowed
            if not known:
                logger.info(
                    "a client at %s with the public key %s is not in the allow-list",
                    address.decode("ascii", "replace"),
                    key.hex(),
                )
            answer = (b"200", b"OK") if known else (b"400", b"the key is not in the allow-list")
            self._sock.send_multipart([version, number, *answer, b"", b""])
