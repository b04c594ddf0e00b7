"""Opening one service by hand, in this process or where it is served already."""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from asyncflow_core.errors import PluginNotFoundError
from asyncflow_core.flow.serve import INTERFACES, SUPPORTS
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registry
from asyncflow_core.services.base import Service
from asyncflow_core.wire import Client, remote

__all__ = ["open_service"]


class _Opening:
    """`async with open_service(...) as service`."""

    def __init__(
        self,
        kind: str,
        plugin: str,
        client: Client | None,
        timeout_s: float | None,
        registry: Registry,
        options: Any,
    ) -> None:
        self._kind = kind
        self._plugin = plugin
        self._client = client
        self._timeout_s = timeout_s
        self._registry = registry
        self._options = options
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Any:
        if self._kind not in INTERFACES:
            raise PluginNotFoundError(
                f"{self._kind!r} is not a service; services are {', '.join(INTERFACES)}"
            )
        if self._client is not None:
            client = await self._stack.enter_async_context(self._client)
            served: Service = remote(
                INTERFACES[self._kind],
                client,
                self._kind,
                supports=_offered(client, self._kind),
                timeout_s=self._timeout_s,
            )
            return await self._stack.enter_async_context(served)
        plugin = self._registry.get(self._kind, self._plugin)
        context = PartContext(name=self._kind, registry=self._registry)
        service: Service = plugin.factory(plugin.parse_options(self._options), context)
        return await self._stack.enter_async_context(service)

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
    timeout_s: float | None = 600.0,
    registry: Registry | None = None,
    **options: Any,
) -> _Opening:
    """Open one service for as long as an `async with` block lasts.

    Args:
        kind: data_store, rollout, trainer or weight_sync.
        plugin: its name; left out with `address`.
        address: where `asyncflow serve` answers, to call it there.
        token: secret that `asyncflow serve` was given.
        timeout_s: deadline of each call to a served one; None for none.
        registry: plugins to use; default: the installed ones.
        options: of the plugin.
    """
    client = (
        Client(address, name=f"{kind}-{secrets.token_hex(4)}", token=token) if address else None
    )
    return _Opening(kind, plugin, client, timeout_s, registry or Registry(), options)


def _offered(client: Client, kind: str) -> list[type[Any]]:
    """What the served one can do beyond its interface."""
    methods = set(client.catalogue[kind][2]) if kind in client.catalogue else set()
    return [
        protocol
        for protocol in SUPPORTS.get(kind, ())
        if {name for name in vars(protocol) if not name.startswith("_")} <= methods
    ]
