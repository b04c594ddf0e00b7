"""Building what plugins offer: a factory's own exceptions name the plugin."""

from __future__ import annotations

from typing import Any

from asyncflow_core.errors import AsyncFlowError, ServiceError
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Plugin

__all__ = ["build", "described"]


def build(plugin: Plugin, options: Any, ctx: PartContext) -> Any:
    """What a plugin's factory makes of validated options.

    Raises:
        ServiceError: the factory raised.
    """
    try:
        return plugin.factory(options, ctx)
    except AsyncFlowError:
        raise
    except Exception as error:
        raise ServiceError(
            f"{plugin.label} of {plugin.distribution} cannot be built: {described(error)}",
            service=ctx.name,
        ) from error


def described(error: BaseException) -> str:
    """Type and message of somebody else's exception, which may have no message."""
    return ": ".join(filter(None, (type(error).__name__, str(error))))
