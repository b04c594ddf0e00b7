"""One forward and backward of the trainer: the loss, its sums, passes that only keep in step."""

from __future__ import annotations

import math
from typing import Any

import torch
from numpy.typing import NDArray

from asyncflow_core.batch import Batch
from asyncflow_core.errors import EngineError
from asyncflow_core.losses import ResolvedLoss
from asyncflow_core.services.trainer import LossOutput, loss_columns
from asyncflow_hzp.forward import Packed

__all__ = ["Sums", "backward_zero", "loss_of", "nothing", "number_of"]


class Sums:
    """Sums over the forwards of one micro-batch."""

    def __init__(self) -> None:
        self.total, self.weight = 0.0, 0.0
        self.metrics: dict[str, tuple[float, float]] = {}
        self.failure: Exception | None = None

    def add(self, found: tuple[float, float, dict[str, tuple[float, float]]] | Exception) -> None:
        """Add what one forward gave; the first failure counts."""
        if isinstance(found, Exception):
            self.failure = found
            return
        self.total, self.weight = self.total + found[0], self.weight + found[1]
        for name, (number, over) in found[2].items():
            before = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = (before[0] + number_of(number), before[1] + number_of(over))


def loss_of(
    part: Batch,
    loss: ResolvedLoss,
    logprobs: torch.Tensor,
    entropy: torch.Tensor | None,
    update: int,
) -> LossOutput:
    """The loss of one forward.

    Raises:
        EngineError: it is not finite, or has a value but no gradient; names the update.
    """
    columns: dict[str, Any] = {
        name: torch.from_numpy(_writable(array)).to(logprobs.device)
        for name, array in loss_columns(part, loss.capabilities.reads).items()
    }
    if entropy is not None:
        columns["entropy"] = entropy
    result = loss(logprobs, columns)
    value, weight = number_of(result.sum), number_of(result.weight)
    if not math.isfinite(value) or not math.isfinite(weight) or weight < 0:
        raise EngineError(
            f"loss {loss.name!r} gave the sum {value} and weight {weight} in update {update}; "
            f"both must be finite, the weight not negative"
        )
    if value and not getattr(result.sum, "requires_grad", False):
        raise EngineError(
            f"loss {loss.name!r} gave the sum {value} without a gradient; compute it from "
            f"the log-probs it is given"
        )
    return result


def nothing(device: torch.device) -> Packed:
    """A forward of one token whose log-prob nobody asks for."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return Packed(ids=zero[None], at=zero, targets=zero, temperature=None)


def backward_zero(logprobs: torch.Tensor) -> None:
    """A backward that changes nothing, but reaches every parameter."""
    zero: Any = logprobs.sum() * 0.0  # torch leaves the method untyped
    zero.backward()


def number_of(value: Any) -> float:
    """A loss may give floats or tensors, with a gradient or not."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """Received columns are read-only, which torch does not know."""
    return array if array.flags.writeable else array.copy()
