"""The pluggy hooks. They are for registration, sync, and never called per sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from asyncflow_core.registry import Registrar

__all__ = ["PROJECT", "asyncflow_register", "hookimpl", "hookspec"]

PROJECT = "asyncflow"
"""Name of the pluggy project and of the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def asyncflow_register(registrar: Registrar) -> None:
    """Register what a plugin module offers.

    Called once, when a configuration names one of the module's entry points, or when
    `asyncflow plugins --load` lists capabilities. The module must import fast (below 0.2 s): give
    factories that import the engine when they are called.

    Args:
        registrar: takes every offer through `registrar.add(...)`.

    Runs in: any process that needs the plugin, main thread.
    Not called: for entry points nobody asked for.
    """
