"""Cutting a model into units, and the modules whose forward needs them.

A unit's parameters are of one kind: trainable or frozen, one dtype, one family (dense, or the
experts of an expert-parallel layer). A module with parameters of several kinds has several units.
Parameters outside of the chosen modules belong to the module that holds them; small ones join the
next, so that a final norm travels with the head behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from asyncflow_core.errors import ConfigError
from asyncflow_hzp.config import Units

__all__ = ["DENSE", "Cut", "cut_units", "expert_parallel", "family_of", "parts_in", "parts_of"]

DENSE = "dense"
_SMALL = 1 << 14
"""Elements; a leftover unit below joins its neighbour."""
_FAMILY = "_hzp_family"


def expert_parallel(module: nn.Module, size: int) -> nn.Module:
    """Mark a module's parameters as one of `size` different parts, a neighbouring rank each."""
    object.__setattr__(module, _FAMILY, f"expert{size}")
    return module


def family_of(module: nn.Module) -> str | None:
    """The family a module was marked with."""
    found: str | None = getattr(module, _FAMILY, None)
    return found


def parts_in(family: str) -> int:
    """Over how many neighbouring ranks a family's parameters are spread; 1 for dense ones."""
    return 1 if family == DENSE else int(family.removeprefix("expert"))


def parts_of(model: nn.Module) -> dict[int, int]:
    """`parts_in` by id, of every module inside one that was marked."""
    return {
        id(module): parts_in(family)
        for marked in model.modules()
        if (family := family_of(marked))
        for module in marked.modules()
    }


@dataclass(slots=True, eq=False)
class Cut:
    """Parameters of one unit-to-be, and the modules that need them gathered.

    `chosen` by the user; a leftover that `joins` may travel with another.
    """

    name: str
    family: str
    named: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    joins: bool = False
    chosen: bool = False

    @property
    def kind(self) -> tuple[bool, torch.dtype, str]:
        """What all its parameters have in common."""
        param = self.named[0][1]
        return param.requires_grad, param.dtype, self.family

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(param.numel() for _, param in self.named)


def cut_units(model: nn.Module, units: Units | None) -> list[Cut]:
    """The units of a model, in the order of its modules.

    Raises:
        ConfigError: no module is a unit of those asked for, or there is no parameter.
    """
    families = dict(_families(model))
    roots = [
        (name, module)
        for name, module in model.named_modules()
        if _chosen(units, name, module) or family_of(module)
    ]
    if units is not None and not any(_chosen(units, n, m) for n, m in roots):
        raise ConfigError(f"no module of the model is a unit of {units!r}")
    chosen = {id(root) for _, root in roots}
    inside = {id(module) for _, root in roots for module in root.modules()}
    seen: dict[nn.Parameter, Cut] = {}
    cuts: list[Cut] = []
    for name, module in model.named_modules():
        if id(module) in chosen:
            taken = _take(name, module, list(_own(module, chosen, name)), families, seen)
            for cut in taken:
                cut.chosen = True
            cuts += taken
        elif id(module) not in inside:
            held = module.named_parameters(recurse=False, remove_duplicate=False)
            named = [(_join(name, key), param) for key, param in held]
            rest = _take(name, module, named, families, seen)
            for cut in rest:
                cut.joins = not any(id(child) in chosen for child in module.modules())
            cuts += rest
    if not cuts:
        raise ConfigError("the model has no parameters to shard")
    return _join_small(cuts)


def _join_small(cuts: list[Cut]) -> list[Cut]:
    """Let small leftovers travel with the next leftover of their kind, or the last before."""
    result: list[Cut] = []
    for number, cut in enumerate(cuts):
        after = (other for other in cuts[number + 1 :] if other.joins and other.kind == cut.kind)
        before = (other for other in reversed(result) if other.joins and other.kind == cut.kind)
        host = next(after, None) or next(before, None)
        if cut.joins and host is not None and cut.elements < _SMALL:
            host.named += cut.named
            host.modules += [module for module in cut.modules if module not in host.modules]
        else:
            result.append(cut)
    return result


def _families(model: nn.Module) -> Iterator[tuple[nn.Parameter, str]]:
    for module in model.modules():
        family = family_of(module)
        if family:
            for param in module.parameters():
                yield param, family


def _chosen(units: Units | None, name: str, module: nn.Module) -> bool:
    if units is None or not name:
        return False
    if isinstance(units, (type, tuple)):
        return isinstance(module, units)
    return units(name, module)


def _own(module: nn.Module, chosen: set[int], name: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters under a unit's module but not under another unit inside it."""
    for key, param in module.named_parameters(recurse=False, remove_duplicate=False):
        yield _join(name, key), param
    for key, child in module.named_children():
        if id(child) not in chosen:
            yield from _own(child, chosen, _join(name, key))


def _take(
    name: str,
    module: nn.Module,
    named: list[tuple[str, nn.Parameter]],
    families: dict[nn.Parameter, str],
    seen: dict[nn.Parameter, Cut],
) -> list[Cut]:
    """New units for a module's parameters; of tied ones it needs the unit that has them."""
    cuts: dict[Any, Cut] = {}
    for key, param in named:
        if param in seen:
            if module not in seen[param].modules:
                seen[param].modules.append(module)
            continue
        family = families.get(param, DENSE)
        kind = (param.requires_grad, param.dtype, family)
        if kind not in cuts:
            suffix = "" if not cuts else f"[{len(cuts)}]"
            cuts[kind] = Cut((name or "model") + suffix, family, modules=[module])
        cuts[kind].named.append((key, param))
        seen[param] = cuts[kind]
    return list(cuts.values())


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
