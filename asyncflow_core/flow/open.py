"""Opening one service by hand, in this process or where it is served already."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from asyncflow_core.errors import PluginNotFoundError
from asyncflow_core.flow.serve import INTERFACES
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registry
from asyncflow_core.services.base import Service
from asyncflow_core.wire import Client, remote

__all__ = ["open_service"]


class _Opening:
    """`async with open_service(...) as service`."""

    def __init__(
        self, kind: str, plugin: str, address: str, token: str, registry: Registry, options: Any
    ) -> None:
        self._kind = kind
        self._plugin = plugin
        self._address = address
        self._token = token
        self._registry = registry
        self._options = options
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Any:
        if self._kind not in INTERFACES:
            raise PluginNotFoundError(
                f"{self._kind!r} is not a service; services are {', '.join(INTERFACES)}"
            )
        if self._address:
            client = Client(self._address, name=f"{self._kind}-user", token=self._token)
            await self._stack.enter_async_context(client)
            served: Service = remote(INTERFACES[self._kind], client, self._kind)
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
    registry: Registry | None = None,
    **options: Any,
) -> _Opening:
    """Open one service for as long as an `async with` block lasts.

    Args:
        kind: data_store, rollout, trainer or weight_sync.
        plugin: its name; left out with `address`.
        address: where `asyncflow serve` answers, to call it there.
        token: secret that `asyncflow serve` was given.
        registry: plugins to use; default: the installed ones.
        options: of the plugin.
    """
    return _Opening(kind, plugin, address, token, registry or Registry(), options)
