"""Giving memory and values to parameters made on the meta device, one unit at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from asyncflow_core.errors import ConfigError
from asyncflow_hzp.units import Cut

__all__ = ["materialize", "materialize_buffers"]


def materialize(
    model: nn.Module, cut: Cut, device: torch.device, init: Callable[[nn.Module], None] | None
) -> None:
    """Replace a unit's meta parameters, and the buffers of their modules, by initialised ones.

    Args:
        model: where the parameters hang, tied ones in several places.
        cut: the unit; its parameters are replaced in it too.
        device: where they go.
        init: gives values to one module; None calls its `reset_parameters`.

    Raises:
        ConfigError: a module has no `reset_parameters`.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for _, param in cut.named:
        memory = torch.empty(param.shape, dtype=param.dtype, device=device)
        made[param] = nn.Parameter(memory, requires_grad=param.requires_grad)
    holders = []
    for module in model.modules():
        held = [(key, param) for key, param in module._parameters.items() if param in made]
        if not held:
            continue
        for key, param in held:
            assert param is not None
            module._parameters[key] = made[param]
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)
        holders.append(module)
    cut.named = [(name, made[param]) for name, param in cut.named]
    with torch.no_grad():
        for module in holders:
            kept = _put_aside(module, set(made.values()))
            (init or _reset)(module)
            module._parameters.update(kept)


def _put_aside(module: nn.Module, made: set[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Let copies take the values that are meant for parameters which have theirs already."""
    kept = {}
    for key, param in module._parameters.items():
        if param is not None and param not in made and not param.is_meta:
            kept[key] = param
            module._parameters[key] = nn.Parameter(torch.empty_like(param), param.requires_grad)
    return kept


def materialize_buffers(
    model: nn.Module, device: torch.device, init: Callable[[nn.Module], None] | None
) -> None:
    """Give buffers of modules without parameters of their own memory and values.

    Raises:
        ConfigError: such a module has no `reset_parameters`, and there is no `init`.
    """
    with torch.no_grad():
        for module in model.modules():
            found = {k: b for k, b in module._buffers.items() if b is not None and b.is_meta}
            for key, buffer in found.items():
                module._buffers[key] = torch.empty_like(buffer, device=device)
            if found:
                (init or _reset)(module)


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ConfigError(
            f"{type(module).__name__} is on the meta device and has no reset_parameters; give "
            f"Config(init=...)"
        )
    reset()
