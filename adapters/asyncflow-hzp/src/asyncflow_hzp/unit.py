"""A unit: parameters that are gathered and reduced together, as one flat tensor.

Shapes: n elements of a unit, padded so that every shard is aligned. `held` [n/z3] is this rank's
part of the parameters; `master` [n/z1] what the optimizer updates, a view of `held` where both have
one dtype; `grad` [n/z1] the reduced gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from asyncflow_hzp.lanes import Job
from asyncflow_hzp.layout import Layout, Piece

__all__ = ["Entry", "Slot", "Unit"]

_ALIGN = 16
"""Elements between starts of parameters, so that kernels may use wide loads."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A parameter's name and place in the flat tensor."""

    name: str
    param: nn.Parameter
    start: int

    @property
    def stop(self) -> int:
        """First element after it."""
        return self.start + self.param.numel()

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter in a flat tensor of n elements."""
        return flat[self.start : self.stop].view(self.param.shape)


@dataclass(slots=True, eq=False)
class Slot:
    """A buffer that holds one unit at a time."""

    buffer: torch.Tensor
    unit: Unit | None = None


class Unit:
    """Parameters of one kind (all trainable or all frozen, one dtype) of one or more modules."""

    def __init__(
        self,
        number: int,
        name: str,
        named: Sequence[tuple[str, nn.Parameter]],
        layout: Layout,
        *,
        family: str,
        dtype: torch.dtype,
        master_dtype: torch.dtype,
    ) -> None:
        self.number = number
        self.name = name
        self.layout = layout
        self.family = family
        self.dtype = dtype
        self.trainable = named[0][1].requires_grad
        self.master_dtype = master_dtype if self.trainable else dtype
        # Matrices first: an optimizer's groups (decayed or not) become few stretches.
        ordered = sorted(named, key=lambda item: item[1].ndim < 2)
        entries, start = [], 0
        for key, param in ordered:
            entries.append(Entry(key, param, start))
            start += -(-param.numel() // _ALIGN) * _ALIGN
        self.entries = tuple(entries)
        self.elements = layout.padded(start, align=_ALIGN)
        self.device = entries[0].param.device
        sizes = layout.sizes
        self.whole = sizes.z3 == 1
        low, high = layout.shard(sizes.z3, self.elements)
        own = layout.shard(sizes.z1, self.elements)
        self.shard = own
        self._own = slice(own[0] - low, own[1] - low)
        self.gather_pieces = layout.pieces(sizes.z3, 1, self.elements)
        self.publish_pieces = tuple(
            Piece(piece.rank, piece.start - low, piece.stop - low)
            for piece in layout.pieces(sizes.z1, sizes.z3, self.elements)
        )
        self._held_range = (low, high)
        self.held = torch.empty(0)
        self.master = torch.empty(0)
        self.grad: torch.Tensor | None = None
        self.slot: Slot | None = None
        self.gathering: Job | None = None
        self.publishing: Job | None = None
        self.bound = False
        self.stale = False
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        self._absent: tuple[torch.Tensor, ...] = ()

    def take(self, flat: torch.Tensor) -> None:
        """Keep this rank's shards of n elements, and let go of the parameters' own memory.

        A parameter that is not gathered keeps its shape and reads as NaN.
        """
        low, high = self._held_range
        device = flat.device
        self.device = device
        self.held = flat[low:high].to(self.dtype, copy=True)
        if self.master_dtype == self.dtype:
            self.master = self.held[self._own]
        else:
            self.master = flat[self.shard[0] : self.shard[1]].to(self.master_dtype, copy=True)
        nothing = torch.full((), float("nan"), dtype=self.dtype, device=device)
        self._absent = tuple(nothing.expand(entry.param.shape) for entry in self.entries)
        if self.whole:
            self._point(tuple(entry.view(self.held) for entry in self.entries))
        else:
            self._point(self._absent)

    def flat(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """All parameters of the unsharded model in one tensor, padding zero."""
        result = torch.zeros(self.elements, dtype=dtype, device=device)
        for entry in self.entries:
            entry.view(result).copy_(entry.param.data)
        return result

    def bind(self) -> None:
        """Let the parameters be views of the slot, when what it gathers is there."""
        assert self.slot is not None
        assert self.gathering is not None
        if self.bound:
            return
        self.gathering.wait()
        buffer = self.slot.buffer
        views = self._views.get(id(buffer))
        if views is None:
            views = tuple(entry.view(buffer) for entry in self.entries)
            self._views[id(buffer)] = views
        self._point(views)
        self.bound = True

    def settle(self) -> None:
        """Wait until no lane reads or writes this rank's shards."""
        if self.publishing is not None:
            self.publishing.wait()
            self.publishing = None
        if self.gathering is not None:
            self.gathering.wait()

    def unbind(self) -> None:
        """Give the slot back."""
        if self.slot is not None:
            self.slot.unit = None
        if self.bound:
            self._point(self._absent)
        self.slot, self.gathering, self.bound = None, None, False

    def _point(self, tensors: Sequence[torch.Tensor]) -> None:
        for entry, tensor in zip(self.entries, tensors, strict=True):
            entry.param.data = tensor

    def put_own(self, buffer: torch.Tensor) -> None:
        """Copy the held shard to its place in n elements."""
        low, high = self._held_range
        buffer[low:high].copy_(self.held)

    def put_master(self) -> None:
        """Round the updated master shard into the held one."""
        if self.master_dtype != self.dtype:
            self.held[self._own].copy_(self.master)

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Stretches of the flat tensor that belong to no parameter."""
        ends = [entry.stop for entry in self.entries]
        starts = [*(entry.start for entry in self.entries[1:]), self.elements]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if start > end)
