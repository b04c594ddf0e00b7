"""Who holds which part of weights, gradients and optimizer state.

`Sharded` is the seam: the trainer above it knows the loss and the schedule, what is below knows the
ranks. `Replicated` is plain data parallelism: every rank holds everything.

Shapes: N elements of all parameters together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from asyncflow_core.errors import DataError
from asyncflow_hzp.ranks import Ranks

if TYPE_CHECKING:
    from asyncflow_hzp.options import HzpOptions

__all__ = ["Replicated", "Sharded"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Sharded(Protocol):
    """Weights, gradients and optimizer state of one model over the ranks."""

    def prepare_gradients(self) -> None:
        """Be ready for a backward; gradients add up over backwards in float32."""

    def reduce_gradients(self, weight: float) -> float:
        """Add gradients and loss weights up over the ranks; returns the total weight."""

    def gradient_norm(self) -> float:
        """Of the reduced sum of gradients, over all parameters."""

    def step(self, *, lr: float, scale: float) -> None:
        """Update the weights by the gradients times `scale`, then zero the gradients."""

    def zero_gradients(self) -> None:
        """Throw the gradients away."""

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter once, whole, in the model's dtype; tensors valid until the next one."""

    def state(self) -> dict[str, torch.Tensor]:
        """Weights and moments in float32 by name, whole, as a checkpoint holds them."""

    def load_state(self, state: Mapping[str, torch.Tensor], *, steps: int) -> None:
        """Take over what `state` gave after `steps` updates; `DataError` if it does not fit."""


class _Slot(NamedTuple):
    """Where a parameter lies in the flat tensors."""

    start: int
    shape: torch.Size

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + prod(self.shape)].view(self.shape)


class Replicated:
    """Everything on every rank, in flat tensors: one all-reduce, one norm, one AdamW call.

    Parameters of a float32 model are views of the flat weights, and their gradients accumulate
    straight into the flat gradients. A bfloat16 model has float32 weights beside it.
    Gradients and moments are allocated by the first backward: a frozen model holds weights only.
    """

    def __init__(self, model: nn.Module, options: HzpOptions, ranks: Ranks) -> None:
        self._options = options
        self._ranks = ranks
        named = list(model.named_parameters())
        # Decayed ones first, so that each of the optimizer's two groups is one stretch.
        named.sort(key=lambda item: item[1].ndim < 2)
        self._params = dict(named)
        self._slots: dict[str, _Slot] = {}
        size = 0
        for name, param in named:
            self._slots[name] = _Slot(size, param.shape)
            size += param.numel()
        self._decayed = sum(param.numel() for _, param in named if param.ndim >= 2)
        first = named[0][1]
        self._compute = torch.empty(size, dtype=first.dtype, device=first.device)
        for name, param in named:
            view = self._slots[name].view(self._compute)
            view.copy_(param.data)
            param.data = view
        mixed = first.dtype != torch.float32
        self._weights = self._compute.float() if mixed else self._compute
        self._gradients: torch.Tensor | None = None
        self._optimizer: torch.optim.AdamW | None = None

    def prepare_gradients(self) -> None:
        """Allocate gradients and optimizer, the first time."""
        if self._gradients is not None:
            return
        # One element more for the loss weight, which travels with the gradients.
        flat = torch.zeros(len(self._weights) + 1, dtype=torch.float32, device=self._weights.device)
        for name, param in self._params.items():
            view = self._slots[name].view(flat)
            if param.dtype == torch.float32:
                param.grad = view
            else:
                tensor: Any = param  # torch leaves the method untyped
                tensor.register_post_accumulate_grad_hook(_adder(view))
        self._gradients = flat
        self._optimizer = self._make_optimizer(flat)

    def _make_optimizer(self, gradients: torch.Tensor) -> torch.optim.AdamW:
        options, end = self._options, len(self._weights)
        groups = []
        for start, stop, decay in (
            (0, self._decayed, options.weight_decay),
            (self._decayed, end, 0.0),
        ):
            if stop > start:
                stretch = nn.Parameter(self._weights[start:stop])
                stretch.grad = gradients[start:stop]
                groups.append({"params": [stretch], "weight_decay": decay})
        return torch.optim.AdamW(
            groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True
        )

    def reduce_gradients(self, weight: float) -> float:
        """Sum the flat gradients and the weight over the ranks in one all-reduce."""
        if self._ranks.size == 1:
            return weight
        self.prepare_gradients()  # a rank that got only empty batches still takes part
        gradients = self._held()
        gradients[-1] = weight
        self._ranks.sum(gradients)
        total = float(gradients[-1])
        gradients[-1] = 0.0
        return total

    def gradient_norm(self) -> float:
        """Of the sum of gradients."""
        return float(torch.linalg.vector_norm(self._held()))

    def step(self, *, lr: float, scale: float) -> None:
        """Scale, update, zero."""
        gradients, optimizer = self._held(), self._optimizer
        assert optimizer is not None
        gradients.mul_(scale)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        if self._compute is not self._weights:
            self._compute.copy_(self._weights)
        gradients.zero_()

    def zero_gradients(self) -> None:
        """Zero the flat gradients, if there are any."""
        if self._gradients is not None:
            self._gradients.zero_()

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's own parameters."""
        for name, param in self._params.items():
            yield name, param.data

    def state(self) -> dict[str, torch.Tensor]:
        """Views by name: `<parameter>`, and after an update `<moment>.<parameter>`."""
        flats = {"weight": self._weights, **self._moments()}
        return {
            f"{kind}.{name}": slot.view(flat)
            for kind, flat in flats.items()
            for name, slot in self._slots.items()
        }

    def _moments(self) -> dict[str, torch.Tensor]:
        if self._optimizer is None:
            return {}
        states = [self._optimizer.state[group["params"][0]] for group in self._groups()]
        if not all(states):
            return {}
        return {moment: torch.cat([state[moment] for state in states]) for moment in _MOMENTS}

    def _groups(self) -> list[dict[str, Any]]:
        assert self._optimizer is not None
        return self._optimizer.param_groups

    def load_state(self, state: Mapping[str, torch.Tensor], *, steps: int) -> None:
        """Check everything, then copy."""
        kinds = ("weight", *_MOMENTS) if steps else ("weight",)
        expected = {
            f"{kind}.{name}": (kind, s) for kind in kinds for name, s in self._slots.items()
        }
        if set(state) != set(expected):
            name = min(set(state) ^ set(expected))
            raise DataError(f"checkpoint and model differ in the tensor {name!r}")
        for name, (_, slot) in expected.items():
            if state[name].shape != slot.shape:
                raise DataError(
                    f"checkpoint tensor {name!r} has shape {tuple(state[name].shape)}, the model "
                    f"{tuple(slot.shape)}"
                )
        flats = {kind: torch.empty_like(self._weights) for kind in _MOMENTS if steps}
        flats["weight"] = self._weights
        for name, (kind, slot) in expected.items():
            slot.view(flats[kind]).copy_(state[name])
        if self._compute is not self._weights:
            self._compute.copy_(self._weights)
        self.zero_gradients()
        self._load_moments(flats, steps)

    def _load_moments(self, flats: Mapping[str, torch.Tensor], steps: int) -> None:
        if not steps:
            if self._gradients is not None:
                self._optimizer = self._make_optimizer(self._gradients)
            return
        self.prepare_gradients()
        optimizer, start = self._optimizer, 0
        assert optimizer is not None
        for group in self._groups():
            param = group["params"][0]
            stop = start + param.numel()
            count = torch.tensor(float(steps), dtype=torch.float32, device=param.device)
            moments = {moment: flats[moment][start:stop].clone() for moment in _MOMENTS}
            optimizer.state[param] = {"step": count, **moments}
            start = stop

    def _held(self) -> torch.Tensor:
        assert self._gradients is not None
        return self._gradients


def _adder(total: torch.Tensor) -> Any:
    def add(param: torch.Tensor) -> None:
        if param.grad is not None:
            total.add_(param.grad)
            param.grad = None

    return add
