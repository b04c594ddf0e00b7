"""Registers the launchers."""

from __future__ import annotations

from typing import Any

from asyncflow_core.flow.processes.inline import InlineLauncher
from asyncflow_core.flow.processes.launch import LauncherCapabilities
from asyncflow_core.flow.processes.local import LocalLauncher, LocalOptions
from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registrar, Registry

__all__ = ["asyncflow_register"]


def _inline(options: Any, ctx: PartContext) -> InlineLauncher:
    return InlineLauncher(ctx.registry or Registry())


@hookimpl
def asyncflow_register(registrar: Registrar) -> None:
    """Offer `local` and `inline`."""
    registrar.add(
        "launcher",
        "local",
        lambda options, ctx: LocalLauncher(options),
        api_version=1,
        options=LocalOptions,
        capabilities=LauncherCapabilities(processes=True, locality="host"),
    )
    registrar.add(
        "launcher",
        "inline",
        _inline,
        api_version=1,
        capabilities=LauncherCapabilities(processes=False, locality="process"),
    )
