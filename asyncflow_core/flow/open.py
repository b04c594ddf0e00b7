"""Opening one service by hand, in this process or where it is served already."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack
from os import PathLike
from types import TracebackType
from typing import Any

from asyncflow_core.errors import ConfigError, PluginNotFoundError
from asyncflow_core.flow.building import build
from asyncflow_core.flow.processes.serve import INTERFACES, SUPPORTS
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registry
from asyncflow_core.services.base import Service
from asyncflow_core.wire import Client, KeyPair, remote

__all__ = ["open_service"]

_CALL_S = 600.0


class _Opening:
    """`async with open_service(...) as service`."""

    def __init__(
        self,
        kind: str,
        plugin: str,
        client: Client | None,
        timeout_s: float | None,
        registry: Registry | None,
        options: Mapping[str, Any],
    ) -> None:
        self._kind = kind
        self._plugin = plugin
        self._client = client
        self._timeout_s = timeout_s
        self._registry = registry
        self._options = options
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Any:
        async with AsyncExitStack() as stack:
            opened = await self._open(stack)
            self._stack = stack.pop_all()
            return opened

    async def _open(self, stack: AsyncExitStack) -> Any:
        if self._client is not None:
            client = await stack.enter_async_context(self._client)
            served: Service = remote(
                INTERFACES[self._kind],
                client,
                self._kind,
                supports=_offered(client, self._kind),
                timeout_s=self._timeout_s,
            )
            return await stack.enter_async_context(served)
        registry = self._registry or Registry()
        plugin = registry.get(self._kind, self._plugin)
        context = PartContext(name=self._kind, registry=registry)
        service: Service = build(plugin, plugin.parse_options(self._options), context)
        return await stack.enter_async_context(service)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()


def open_service(
    kind: str,
    plugin: str = "",
    *,
    address: str = "",
    token: str = "",
    keys: str | PathLike[str] = "",
    timeout_s: float | None = _CALL_S,
    registry: Registry | None = None,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> _Opening:
    """Open one service for as long as an `async with` block lasts.

    Args:
        kind: data_store, rollout, trainer or weight_sync.
        plugin: its name; left out with `address`.
        address: where `asyncflow serve` answers, to call it there.
        token: secret that `asyncflow serve` was given.
        keys: file of this client's key pair, for an address `tcp://HOST:PORT#KEY`.
        timeout_s: deadline of each call to a served one; None for none.
        registry: plugins to use; default: the installed ones.
        options: of the plugin, those that are called as one of these arguments.
        more: all other options of the plugin.

    Raises:
        PluginNotFoundError: there is no such kind of service.
        ConfigError: something was given that would have no effect.
    """
    if kind not in INTERFACES:
        raise PluginNotFoundError(
            f"{kind!r} is not a service; services are {', '.join(INTERFACES)}"
        )
    values = {**(options or {}), **more}
    idle: dict[str, Any]
    if address:
        idle = {"plugin": plugin, "registry": registry, "options": values}
        where = "a served one, which was given its own when it started"
    else:
        idle = {"token": token, "keys": keys, "timeout_s": timeout_s != _CALL_S}
        where = "one in this process; a plugin's option of that name goes into `options`"
    given = [name for name, value in idle.items() if value]
    if given:
        raise ConfigError(f"{', '.join(given)} would have no effect on {where}")
    client = None
    if address:
        client = Client(
            address,
            name=f"{kind}-{secrets.token_hex(4)}",
            token=token,
            keys=KeyPair.load(keys) if keys else None,
        )
    return _Opening(kind, plugin, client, timeout_s, registry, values)


def _offered(client: Client, kind: str) -> list[type[Any]]:
    """What the served one can do beyond its interface."""
    methods = set(client.catalogue[kind][2]) if kind in client.catalogue else set()
    return [
        protocol
        for protocol in SUPPORTS.get(kind, ())
        if {name for name in vars(protocol) if not name.startswith("_")} <= methods
    ]
