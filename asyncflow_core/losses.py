"""Losses by name, for trainers: found through the registry and bound to their options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel

from asyncflow_core.errors import ConfigError, PluginLoadError
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registry
from asyncflow_core.services.trainer import Loss, LossCapabilities, LossOutput, LossSpec

__all__ = ["ResolvedLoss", "resolve_loss"]


@dataclass(frozen=True, slots=True)
class ResolvedLoss:
    """A loss bound to its options, as a trainer calls it.

    Attributes:
        name: of the plugin.
        loss: what the plugin's factory built.
        options: validated; the loss's `config`.
        capabilities: what it reads.
    """

    name: str
    loss: Loss
    options: BaseModel
    capabilities: LossCapabilities

    def __call__(self, logprobs: Any, columns: Mapping[str, Any]) -> LossOutput:
        """The loss of one micro-batch."""
        return self.loss(logprobs, columns, self.options)


@cache
def _installed() -> Registry:
    return Registry()


def resolve_loss(
    registry: Registry | None,
    spec: LossSpec,
    *,
    arrays: Literal["torch", "numpy"],
    entropy: bool = False,
    ctx: PartContext | None = None,
) -> ResolvedLoss:
    """Find and build the loss of a spec, for a trainer whose losses work on `arrays`.

    Args:
        registry: where to look, a trainer's `ctx.registry`; None: the installed plugins.
        spec: name and options.
        arrays: the trainer's `loss_arrays`.
        entropy: whether the trainer gives losses an `entropy` column.
        ctx: handed to the plugin's factory.

    Raises:
        PluginError: as `Registry.get`, or a loss without `LossCapabilities`.
        ConfigError: options that do not validate, or a loss this trainer cannot run.
    """
    plugin = (_installed() if registry is None else registry).get("loss", spec.name)
    options = plugin.parse_options(spec.options)
    able = plugin.capabilities_for(options)
    if not isinstance(able, LossCapabilities):
        raise PluginLoadError(
            f"loss {spec.name!r} of {plugin.distribution} is registered without LossCapabilities"
        )
    if able.arrays != arrays:
        fitting = (
            f"; choose a loss for {arrays} arrays, or a trainer with loss_arrays={able.arrays!r}"
        )
        raise ConfigError(f"loss {spec.name!r} works on {able.arrays} arrays{fitting}")
    if able.needs_entropy and not entropy:
        raise ConfigError(f"loss {spec.name!r} needs the entropy, which this trainer does not give")
    loss = plugin.factory(options, ctx or PartContext(name=f"loss.{spec.name}"))
    return ResolvedLoss(spec.name, loss, options, able)
