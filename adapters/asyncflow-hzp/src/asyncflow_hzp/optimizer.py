"""Any torch optimizer on the shards of a sharded model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn

from asyncflow_core.errors import ConfigError
from asyncflow_hzp.sharded import Sharded
from asyncflow_hzp.unit import Entry, Unit

__all__ = ["Optimizer"]

Groups = Callable[[str, nn.Parameter], str]
"""Names the group of a parameter."""


class Optimizer:
    """Updates each rank's shards of size n/z1, unit by unit, and spreads the result.

    Units are updated in the order in which their gradients arrive; after `clip_grad_norm`, which
    needs all of them, in the order of the forward, whose first gathers then start at once.

    Args:
        model: what `shard` returned.
        kind: an optimizer's class; it sees stretches of flat tensors, or, with `whole`, parameters.
        groups: settings by name of a group; "default" is for what `group_of` does not name.
        group_of: names a parameter's group.
        whole: give the class whole parameters (Muon needs matrices); z1 must be 1.
        settings: of all groups.
    """

    def __init__(
        self,
        model: Sharded,
        kind: Callable[..., torch.optim.Optimizer],
        *,
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        group_of: Groups | None = None,
        whole: bool = False,
        **settings: Any,
    ) -> None:
        if whole and any(u.layout.sizes.z1 > 1 for u in model.units if u.trainable):
            raise ConfigError(f"{kind} needs whole parameters: give sharding with z1 = 1")
        self._model = model
        self._reduction = model.reduction
        self._group_of = group_of or (lambda name, param: "default")
        self._settings = {"default": {}, **(groups or {})}
        self.param_groups: list[dict[str, Any]] = [
            {"name": name, **settings, **more} for name, more in self._settings.items()
        ]
        self._inner: dict[Unit, torch.optim.Optimizer] = {}
        self._pieces: dict[Unit, list[tuple[nn.Parameter, slice]]] = {}
        self._known = False
        self._norm = torch.zeros((), dtype=torch.float32, device=model.device)
        self._part = torch.zeros((), dtype=torch.float32, device=model.device)
        for unit in model.units:
            if unit.trainable:
                self._build(unit, kind, whole)
        first = next(iter(self._inner.values()))
        for mine, made in zip(self.param_groups, first.param_groups, strict=False):
            for key, value in made.items():
                if key not in ("params", "name"):
                    mine.setdefault(key, value)

    def _build(self, unit: Unit, kind: Callable[..., torch.optim.Optimizer], whole: bool) -> None:
        by_group: dict[str, list[nn.Parameter]] = {name: [] for name in self._settings}
        pieces = []
        for group, part, shape in self._stretches(unit, whole):
            piece = nn.Parameter(unit.master[part].view(shape) if shape else unit.master[part])
            by_group[group].append(piece)
            pieces.append((piece, part))
        # Every unit has all groups, so that settings are copied by position.
        self._pieces[unit] = pieces
        self._inner[unit] = kind(
            [
                {**self.param_groups[n], "params": params}
                for n, params in enumerate(by_group.values())
            ],
        )

    def _stretches(self, unit: Unit, whole: bool) -> Iterator[tuple[str, slice, torch.Size | None]]:
        """Neighbouring parameters of one group, cut to this rank's shard."""
        low, high = unit.shard
        open_group, start, stop = "", 0, 0
        for entry in unit.entries:
            begin, end = max(entry.start, low), min(entry.stop, high)
            if begin >= end:
                continue
            group = self._group_of(entry.name, entry.param)
            if whole:
                yield group, slice(begin - low, end - low), entry.param.shape
            elif group == open_group:
                stop = end
            else:
                if open_group:
                    yield open_group, slice(start - low, stop - low), None
                open_group, start, stop = group, begin, end
        if open_group:
            yield open_group, slice(start - low, stop - low), None

    def clip_grad_norm(self, limit: float | None) -> float:
        """The norm of the whole gradient; it is scaled down to `limit`. All ranks call it."""
        norm = self.grad_norm()
        if limit is not None and norm > limit:
            self.scale(limit / norm)
        return norm

    def grad_norm(self) -> float:
        """The norm of the whole gradient, each shard counted once. All ranks call it."""
        self._reduction.finish()
        self._known = True
        self._norm.zero_()
        for unit in self._inner:
            grad = self._reduction.wait(unit)
            if unit.layout.is_first_replica:
                torch.linalg.vector_norm(grad, out=self._part)
                self._norm.add_(self._part.square_())
        if self._model.world_size > 1:
            distributed.all_reduce(self._norm)
        return math.sqrt(float(self._norm))

    def scale(self, factor: float) -> None:
        """Multiply the whole gradient."""
        self._reduction.finish()
        for unit in self._inner:
            self._reduction.wait(unit).mul_(factor)

    @torch.no_grad()
    def step(self) -> None:
        """Update. All ranks call it; the gradients are forgotten."""
        residency = self._model.residency
        self._reduction.finish()
        residency.drop_all()
        for unit in self._units():
            grad = self._reduction.wait(unit)
            inner = self._inner[unit]
            for group, settings in zip(inner.param_groups, self.param_groups, strict=True):
                group.update({k: v for k, v in settings.items() if k != "params"})
            for piece, part in self._pieces[unit]:
                piece.grad = grad[part].view(piece.shape)
            if self._pieces[unit]:
                inner.step()
            residency.publish(unit)
        self.zero_grad()

    def _units(self) -> list[Unit]:
        """A fixed order: of time nothing may depend."""
        forward = self._model.residency.trace.order[0]
        place = {number: at for at, number in reversed(list(enumerate(forward)))}
        known = sorted(self._inner, key=lambda unit: place.get(unit.number, unit.number))
        return known if self._known else self._reduction.order or known[::-1]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._reduction.clear()
        self._known = False

    def layout(self) -> Iterator[tuple[Unit, nn.Parameter, list[tuple[Entry, int, int, int]]]]:
        """Every stretch given to the optimizer, and what of which parameters lies where in it.

        An entry comes with begin and end within the parameter, and its place in the stretch.
        """
        for unit, pieces in self._pieces.items():
            low = unit.shard[0]
            for piece, part in pieces:
                start, stop = part.start + low, part.stop + low
                entries = []
                for entry in unit.entries:
                    begin, end = max(entry.start, start), min(entry.stop, stop)
                    if begin < end:
                        at = begin - start
                        entries.append((entry, begin - entry.start, end - entry.start, at))
                yield unit, piece, entries

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Set the state of every stretch, in the order of `layout`."""
        remaining = iter(states)
        for unit, pieces in self._pieces.items():
            inner = self._inner[unit]
            inner.state.clear()
            for piece, _ in pieces:
                state = next(remaining)
                if state:
                    inner.state[piece] = dict(state)

    def state_of(self, unit: Unit, piece: nn.Parameter) -> Mapping[str, Any]:
        """The torch optimizer's state of a stretch."""
        state: Mapping[str, Any] = self._inner[unit].state.get(piece, {})
        return state
