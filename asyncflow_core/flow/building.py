"""Building what plugins offer: a factory's own exceptions name the plugin."""

from __future__ import annotations

from typing import Any

from asyncflow_core.errors import AsyncFlowError, ServiceError
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Plugin
from asyncflow_core.services.data_store import DataStore
from asyncflow_core.services.rollout import Rollout
from asyncflow_core.services.trainer import Trainer
from asyncflow_core.services.weight_sync import WeightSync

__all__ = ["build", "described"]

_SERVICES = {
    "data_store": DataStore,
    "rollout": Rollout,
    "trainer": Trainer,
    "weight_sync": WeightSync,
}


def build(plugin: Plugin, options: Any, ctx: PartContext) -> Any:
    """What a plugin's factory makes of validated options.

    Raises:
        ServiceError: the factory raised, or made something else than the service of its kind.
    """
    try:
        made = plugin.factory(options, ctx)
    except AsyncFlowError:
        raise
    except Exception as error:
        raise ServiceError(
            f"{plugin.label} of {plugin.distribution} cannot be built: {described(error)}",
            service=ctx.name,
        ) from error
    service = _SERVICES.get(plugin.kind)
    if service is not None and not isinstance(made, service):
        raise ServiceError(
            f"{plugin.label} of {plugin.distribution} cannot be built: its factory returned "
            f"{made!r}, which is no asyncflow_core.{service.__name__}; let it return one",
            service=ctx.name,
        )
    return made


def described(error: BaseException) -> str:
    """Type and message of somebody else's exception, which may have no message."""
    return ": ".join(filter(None, (type(error).__name__, str(error))))
