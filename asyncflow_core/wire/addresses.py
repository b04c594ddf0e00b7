"""Addresses: what they reach, and what may be listened at. Pure but for the paths of sockets."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import urllib.parse
from pathlib import Path

from asyncflow_core.errors import ConfigError
from asyncflow_core.wire.keys import parse_key

__all__ = [
    "check_path",
    "check_reach",
    "is_ipv6",
    "is_local",
    "listens",
    "split_key",
    "with_key",
]

_SUN_PATH_BYTES = 107
_KEYS = "`asyncflow keys new FILE` makes a pair"


def split_key(address: str) -> tuple[str, bytes | None]:
    """Where to connect, and the public key of the server there, as in `tcp://HOST:PORT#KEY`.

    Raises:
        ConfigError: what follows the # is no key.
    """
    where, mark, key = address.partition("#")
    return where, parse_key(key) if mark else None


def with_key(address: str, public: bytes) -> str:
    """The inverse of `split_key`."""
    return f"{address}#{public.hex()}"


def is_local(address: str) -> bool:
    """Whether only this machine reaches an address: ipc, or tcp on the loopback.

    Raises:
        ConfigError: it is neither ipc nor tcp, or has no port.
    """
    if address.startswith("ipc://"):
        return True
    if not address.startswith("tcp://"):
        raise ConfigError(f"the address {address!r} is neither ipc://PATH nor tcp://HOST:PORT")
    parts = urllib.parse.urlsplit(address.replace(":*", ":0"))
    try:
        port = parts.port
    except ValueError:
        port = None
    if port is None:  # libzmq takes 65536 + n for n
        raise ConfigError(
            f"the address {address!r} needs a port from 0 to 65535, or *: HOST:PORT, with a HOST "
            f"of IPv6 in brackets"
        )
    host = parts.hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_ipv6(address: str) -> bool:
    """Whether an address names its host by IPv6, `tcp://[HOST]:PORT`.

    A socket takes such an address only with libzmq's option IPV6, under which names resolve to
    IPv6 first; so only a socket of such an address gets it.
    """
    return address.startswith("tcp://[")


def check_reach(address: str, *, bind: bool, keys: bool) -> None:
    """Refuse a way beyond this machine that is not encrypted.

    Args:
        address: to bind, or to connect to.
        bind: which of the two.
        keys: whether a key pair (and, to bind, an allow-list) is there.

    Raises:
        ConfigError: neither ipc nor tcp; a key is missing, or would have no effect.
    """
    where, server_key = split_key(address)
    beyond = not is_local(where)
    if bind and server_key is not None:
        raise ConfigError(
            f"the address {address!r} to listen at names a key; leave the # and what follows out, "
            "a server's key is that of its own pair"
        )
    if not bind and server_key is not None and not keys:
        raise ConfigError(
            f"the server at {where!r} takes encrypted connections only, and no keys were given; "
            f"{_KEYS}, whose public key goes into the server's allow-list"
        )
    if beyond and not keys:
        need = "keys and allow-list" if bind else "keys"
        raise ConfigError(
            f"the address {address!r} leads beyond this machine, where only encrypted (CURVE) "
            f"connections are allowed, and no {need} were given; {_KEYS}; or use 127.0.0.1 or "
            "ipc://"
        )
    if not bind and server_key is None and keys:
        raise ConfigError(
            f"the address {address!r} does not say which key its server has; write it as the "
            "server prints it, tcp://HOST:PORT#KEY"
        )


def check_path(address: str, *, bind: bool) -> None:
    """Refuse the path of an ipc address that would not work, or not be private.

    Raises:
        ConfigError: too long for the kernel; to bind: in a directory that others may enter, or
            served already.
    """
    if not address.startswith("ipc://"):
        return
    path = Path(address.removeprefix("ipc://"))
    if len(os.fsencode(path)) > _SUN_PATH_BYTES:
        raise ConfigError(
            f"the socket path {str(path)!r} has {len(os.fsencode(path))} bytes, at most "
            f"{_SUN_PATH_BYTES} are allowed by the kernel; use a shorter run directory"
        )
    if not bind:
        return
    try:
        mode = stat.S_IMODE(path.parent.stat().st_mode)
    except OSError as error:
        raise ConfigError(f"the directory of the socket {str(path)!r} is missing: {error}") from (
            error
        )
    if mode & 0o077:
        raise ConfigError(
            f"the directory {str(path.parent)!r} of a socket has mode {mode:04o}: others may enter "
            f"it; only 0700 is allowed; try: chmod 700 {path.parent}"
        )
    # libzmq would take the path from a living server without a word.
    if listens(path):
        raise ConfigError(f"another server listens at {str(path)!r} already")


def listens(path: Path) -> bool:
    """Whether a server is behind a socket's path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(str(path)) == 0
