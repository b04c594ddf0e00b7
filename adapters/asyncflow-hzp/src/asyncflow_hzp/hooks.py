"""Wrapping modules so that their unit is there when they compute, forward and backward.

What autograd saves of a gathered parameter (linear saves a transposed view) lies in a slot that
will hold another unit by the time of the backward. Such a tensor is saved as a recipe: unit, shape,
strides, offset. When a node of the backward unpacks it, the unit is gathered again and the view is
made anew. Everything else goes to the hooks that were there before, so that activation
checkpointing around a unit works: its recompute runs inside the backward, finds the unit gathered
for the recomputed nodes, and gathers it once for both.

Source: FSDP2 instead frees and refills one storage (torch.distributed.fsdp._fully_shard, torch
2.13), which calls the allocator at each gather; recipes need no allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from asyncflow_hzp.residency import Residency
from asyncflow_hzp.unit import Unit

__all__ = ["in_backward", "run_module", "wrap"]

_autograd: Any = torch._C._autograd


class _Recipe(NamedTuple):
    """A view of a gathered unit."""

    unit: Unit
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def in_backward() -> bool:
    """Whether autograd is running on this thread."""
    running: int = torch._C._current_graph_task_id()
    return running != -1


class _Saved(saved_tensors_hooks):
    """Saves views of slots as recipes, everything else as the hooks outside would."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        outside = _autograd._top_saved_tensors_default_hooks(False)
        hooks: tuple[Callable[[Any], Any], Callable[[Any], Any]] = outside or (_same, _same)
        self._pack, self._unpack = hooks
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> object:
        """A recipe, or what the outer hooks make of the tensor."""
        slot = self._residency.slot_of(tensor)
        if slot is None or slot.unit is None or tensor.dtype != slot.buffer.dtype:
            return self._pack(tensor)
        return _Recipe(slot.unit, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again, its unit gathered."""
        if isinstance(saved, _Recipe):
            node = torch._C._current_autograd_node()
            buffer = self._residency.recall(saved.unit, node)
            return buffer.as_strided(saved.size, saved.stride, saved.offset)
        tensor: torch.Tensor = self._unpack(saved)
        return tensor


def _same(value: Any) -> Any:
    return value


def run_module(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model's own code; a name of its own, so that profiles can tell it from ours."""
    return forward(*args, **kwargs)


def _kept(result: Any, residency: Residency) -> Any:
    """What a module returns, with copies of what lies in a slot: the slot's next unit is near."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if residency.slot_of(tensor) is None else tensor.clone()

    if any(
        isinstance(leaf, torch.Tensor) and residency.slot_of(leaf) is not None
        for leaf in tree_leaves(result)
    ):
        return tree_map_only(torch.Tensor, copied, result)
    return result


def wrap(
    module: nn.Module, units: Sequence[Unit], residency: Residency, *, recompute: bool
) -> Callable[[], None]:
    """Replace a module's forward by one that gathers; returns what puts the old one back."""
    forward = module.forward
    saves = any(not unit.whole for unit in units)

    def inner(*args: Any, **kwargs: Any) -> Any:
        backward, grad = in_backward(), torch.is_grad_enabled()
        for unit in units:
            residency.enter(unit, module, backward=backward, grad=grad)
        try:
            if not saves:
                return run_module(forward, args, kwargs)
            with _Saved(residency) if grad else nullcontext():
                return _kept(run_module(forward, args, kwargs), residency)
        finally:
            for unit in units:
                residency.leave(unit)

    def outer(*args: Any, **kwargs: Any) -> Any:
        starts = recompute and torch.is_grad_enabled() and not in_backward()
        if not starts or residency.recomputes:
            return inner(*args, **kwargs)
        residency.recomputes = True
        try:
            return checkpoint(inner, *args, use_reentrant=False, **kwargs)
        finally:
            residency.recomputes = False

    dynamo: Any = torch._dynamo
    module.forward = dynamo.disable(outer, recursive=False)

    def undo() -> None:
        del module.forward

    return undo
