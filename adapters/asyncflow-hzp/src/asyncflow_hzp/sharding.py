"""The trainer's model, sharded: what the engine needs of the library below it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from asyncflow_core.errors import ConfigError
from asyncflow_hzp.config import Config
from asyncflow_hzp.optimizer import Optimizer
from asyncflow_hzp.sharded import shard
from asyncflow_hzp.state import load_state, named_whole, persistent_buffers, save_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from asyncflow_hzp.options import HzpOptions

__all__ = ["Shards", "trainer_config"]


class Shards:
    """Weights, gradients and AdamW state of one model over the ranks.

    Gradients and moments are allocated by the first backward. A frozen model has neither, nor
    float32 weights beside others.
    """

    def __init__(self, model: PreTrainedModel, options: HzpOptions) -> None:
        self._model = shard(model, trainer_config(model, options))
        if options.compile and not self._model.replicated:
            self._model.close()
            raise ConfigError(
                f"compile does not go with sharded parameters {self._model.sizes}; set compile to "
                f"false, or sharding to zero2"
            )
        self._optimizer = Optimizer(
            self._model,
            torch.optim.AdamW,
            groups={"plain": {"weight_decay": 0.0}},
            group_of=lambda _, param: "default" if param.ndim >= 2 else "plain",
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )

    @property
    def meets(self) -> bool:
        """Whether every forward and backward needs all ranks."""
        model = self._model
        each = model.config.accumulate == "shard" and model.sizes.z2 > 1
        return each or not model.replicated

    def prepare_gradients(self, *, last: bool) -> None:
        """Be ready for a backward; `last` says that it is the update's last one on this rank."""
        self._model.reduction.last = last
        self._model.reduction.allocate()

    def gradient_norm(self) -> float:
        """Of the sum of gradients over micro-batches and ranks. All ranks call it."""
        return self._optimizer.grad_norm()

    def step(self, *, lr: float, scale: float) -> None:
        """Update the weights by the gradients times `scale`, then zero the gradients."""
        self._optimizer.scale(scale)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def zero_gradients(self) -> None:
        """Throw the gradients away."""
        self._optimizer.zero_grad()

    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter once, whole, in the model's dtype; all ranks run through it.

        A tensor is valid until the next one is asked for.
        """
        return named_whole(self._model)

    def buffers(self) -> dict[str, torch.Tensor]:
        """What else a checkpoint of the model holds; every rank has it whole."""
        return persistent_buffers(self._model)

    def state(self) -> dict[str, torch.Tensor]:
        """Every float32 weight, whole, in new memory. All ranks call it."""
        return {name: tensor.clone() for name, tensor in named_whole(self._model, master=True)}

    def save(self, directory: Path, *, moments: bool) -> dict[str, Any]:
        """Write this rank's part; returns what one rank must write beside it."""
        return save_state(directory, self._model, self._optimizer if moments else None)

    def load(self, directory: Path, record: Mapping[str, Any]) -> None:
        """Take over what `save` wrote; `DataError` if it does not fit, and nothing changed."""
        load_state(directory, self._model, self._optimizer, record)

    def settle(self) -> None:
        """Wait until the last update has reached the model here."""
        self._model.settle()

    def traffic(self) -> Mapping[str, int]:
        """Bytes sent since the start, by lane and class of link."""
        return self._model.traffic()

    def close(self) -> None:
        """End the lanes."""
        self._model.close()


def trainer_config(model: PreTrainedModel, options: HzpOptions) -> Config:
    """How the trainer shards a model.

    How many micro-batches an update has is not known here. "auto" counts two: where they add up
    they take memory, as many as there may be.
    """
    return Config(
        sharding=options.sharding,
        units=_is_layer(model),
        node_size=options.node_size,
        slots=options.gather_slots,
        accumulate=options.accumulate,
        average=False,
        micro_batches=2,
        memory_bytes=options.memory_bytes,
        timeout_s=options.collective_timeout_s,
    )


def _is_layer(model: PreTrainedModel) -> Any:
    """A decoder layer, by the classes the model declares; else whatever stands in a list."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    if any(type(module).__name__ in names for module in model.modules()):
        return lambda _, module: type(module).__name__ in names
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = {id(child) for children in lists for child in children}
    return (lambda _, module: id(module) in layers) if layers else None
