"""A client's connection, apart from its socket: settings, handshake, and how it ends. Pure."""

from __future__ import annotations

import math
from typing import Any

import zmq

from asyncflow_core.errors import (
    AsyncFlowError,
    BackpressureError,
    ConfigError,
    PeerLostError,
    ServiceClosedError,
    WireDecodeError,
    WireVersionError,
)
from asyncflow_core.wire import _protocol as p
from asyncflow_core.wire._socket import Heartbeat
from asyncflow_core.wire._typed import builder
from asyncflow_core.wire.addresses import split_key
from asyncflow_core.wire.keys import KeyPair
from asyncflow_core.wire.limits import Limits

__all__ = ["WATCHED", "Link", "check_timeout"]

WATCHED = int(
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
"""Events of a connection that end it."""

_FOR_EVER_S = 86400.0


def check_timeout(seconds: float | None) -> None:
    """Refuse a deadline that a server cuts its sender off for, with all its other calls.

    Raises:
        ConfigError: it is negative or not a number.
    """
    if seconds is not None and (math.isnan(seconds) or seconds < 0):
        raise ConfigError(f"a call's timeout_s is 0 or above, or None for none, got {seconds}")


class Link:
    """What both clients know of their one connection.

    Attributes:
        service: the server's name; its address until it has said its name.
        welcomed: the handshake is done.
        catalogue: what the server offers: name to (interface, API version, methods).
        lost: why the connection is of no use any more.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        token: str,
        connect_s: float,
        limits: Limits | None,
        heartbeat: Heartbeat | None,
        keys: KeyPair | None,
    ) -> None:
        """Keep the settings; see `Client`."""
        self.address = address
        self.where, self.server_key = split_key(address)
        self.name = name
        self.connect_s = connect_s
        self.limits = limits or Limits()
        self.heartbeat = heartbeat or Heartbeat()
        self.keys = keys
        self.service = self.where
        self.welcomed = False
        self.catalogue: dict[str, tuple[str, int, list[str]]] = {}
        self.lost: AsyncFlowError | None = None
        self._token = token

    def hello(self) -> list[Any]:
        """What a client says first."""
        return [p.HELLO, p.WIRE_VERSION, self._token, self.name]

    def take(self, message: Any) -> None:
        """Take a message that is about the connection and not about a call.

        Raises:
            AsyncFlowError: the server ended the connection, or never began it; by its own code.
            PeerLostError: it has closed.
            WireVersionError: it speaks another wire version.
            WireDecodeError: the message is none of ours.
        """
        match message:
            case [p.NOOP, *_]:
                pass
            case [p.WELCOME, p.WIRE_VERSION, str(name), dict(catalogue), *_]:
                self.service = name
                build = builder(strict=False).build
                self.catalogue = build(dict[str, tuple[str, int, list[str]]], catalogue)
                self.welcomed = True
            case [p.WELCOME, int(version), *_] if version != p.WIRE_VERSION:
                older = "client" if version > p.WIRE_VERSION else "server"
                raise WireVersionError(
                    f"the server at {self.where!r} speaks wire version {version} and the client "
                    f"{self.name!r} {p.WIRE_VERSION}; upgrade asyncflow-core on the side of the "
                    f"{older}"
                )
            case [p.GOODBYE, ServiceClosedError.code, str(text)]:
                raise PeerLostError(text, service=self.service)
            case [p.GOODBYE, str(code), str(text)]:
                raise p.rebuild_error(code, text, self.service)
            case _:
                raise WireDecodeError(f"{self.service!r} sent a message of no known kind")

    def check(self) -> None:
        """Raise why the connection is lost, if it is."""
        if self.lost is not None:
            raise self.copy_of(self.lost)

    def copy_of(self, error: AsyncFlowError) -> AsyncFlowError:
        """A new one each time: a raised exception collects the tracebacks of all its raises."""
        code, message = p.error_fields(error)
        return p.rebuild_error(code, message, self.service)

    def not_open(self) -> ServiceClosedError:
        """Used before `open` or after `close`."""
        return ServiceClosedError(f"the client of {self.service!r} is not open")

    def unanswered(self) -> PeerLostError:
        """Nobody shook hands in time."""
        return PeerLostError(
            f"no server answered at {self.where!r} within {self.connect_s:g} s; "
            "is the service running?",
            service=self.service,
        )

    def stuck(self) -> BackpressureError:
        """Its queue is full."""
        return BackpressureError(
            f"{self.service!r} has taken none of the last thousands of messages; is it stuck?",
            service=self.service,
        )

    def ended(self, event: int) -> PeerLostError:
        """What an event of the connection (one of `WATCHED`) means."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            own = self.keys.public.hex() if self.keys else "none"
            text = (
                f"the server at {self.where!r} does not let the client {self.name!r} in: its "
                f"public key {own} is not in the server's allow-list; add it there as a line and "
                "start the server again"
            )
        elif event == zmq.EVENT_DISCONNECTED:
            text = f"the connection to {self.service!r} at {self.where} is gone: its process ended"
            if self.heartbeat.timeout_s < _FOR_EVER_S:
                text += f", or was silent for {self.heartbeat.timeout_s:g} s"
        elif self.server_key is None:
            text = (
                f"the server at {self.where!r} ended the handshake: its process ended, or it "
                "takes encrypted connections only; then give the client keys too and the address "
                "as the server prints it, tcp://HOST:PORT#KEY"
            )
        else:
            text = (
                f"the server at {self.where!r} did not prove to hold the key "
                f"{self.server_key.hex()} of its address, or takes no encrypted connections; give "
                "the address as the server prints it now"
            )
        return PeerLostError(text, service=self.service)
