"""`asyncflow serve KIND PLUGIN`: one service for whoever wants to own the loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from asyncflow_core.config_source import parse_override
from asyncflow_core.errors import ConfigError, PluginError
from asyncflow_core.flow.open import open_service
from asyncflow_core.flow.processes.serve import INTERFACES, SUPPORTS, serve_until_stopped
from asyncflow_core.registry import Registry
from asyncflow_core.wire import KeyPair, Server, check_reach, load_allowed, serve_service

__all__ = ["serve_by_hand"]


def serve_by_hand(
    kind: str,
    plugin: str,
    options: Sequence[str],
    bind: str,
    *,
    keys: str | None,
    allow: str | None,
) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if kind not in INTERFACES:
        raise ConfigError(f"{kind!r} is not a service; services are {', '.join(INTERFACES)}")
    check_reach(bind, bind=True, keys=bool(keys and allow))
    for text in options:
        if "=" not in text:
            raise ConfigError(f"the plugin's option {text!r} is not of the form KEY=VALUE")
    values = dict(map(parse_override, options))
    registry = Registry()
    try:
        registry.get(kind, plugin)
    except PluginError as error:  # what was asked for is wrong, and nothing runs yet
        raise ConfigError(str(error)) from error
    token = os.environ.get("ASYNCFLOW_TOKEN") or secrets.token_hex(16)
    server = Server(
        bind,
        name=kind,
        token=token,
        keys=KeyPair.load(keys) if keys else None,
        allow=load_allowed(allow) if allow else (),
    )
    return asyncio.run(_serve(kind, plugin, values, server, token, registry))


@contextlib.contextmanager
def _socket_file(address: str) -> Iterator[None]:
    """Remove the file of a bound ipc socket at the end, which libzmq leaves, if it is ours."""
    path = address.removeprefix("ipc://") if address.startswith("ipc://") else None
    ours = path and os.stat(path).st_ino
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            if path and os.stat(path).st_ino == ours:
                os.unlink(path)


async def _serve(
    kind: str,
    plugin: str,
    options: dict[str, Any],
    server: Server,
    token: str,
    registry: Registry,
) -> int:
    async with open_service(kind, plugin, registry=registry, options=options) as service:
        serve_service(server, kind, service, INTERFACES[kind], supports=SUPPORTS.get(kind, ()))
        async with server:
            with _socket_file(server.address):
                print(f"serving {kind} {plugin} at {server.address}", flush=True)
                if "ASYNCFLOW_TOKEN" not in os.environ:
                    print(f"token {token}", flush=True)
                return await serve_until_stopped(asyncio.get_running_loop().create_future())
