"""Trainer: log-probs, gradients, updates, weights out.

`docs/spec/trainer.md` numbers what every implementation must hold (TR-n).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import Batch, Column
from asyncflow_core.errors import DataError
from asyncflow_core.services.base import Service
from asyncflow_core.services.weight_sync import Bucket

__all__ = [
    "ForwardBackwardInfo",
    "Loss",
    "LossCapabilities",
    "LossOutput",
    "LossSpec",
    "SupportsModelExport",
    "Trainer",
    "TrainerCapabilities",
    "TrainerStats",
    "UpdateInfo",
    "loss_columns",
]


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss by name, with its options; resolved through the registry where the trainer runs."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, loss: LossSpec | str) -> LossSpec:
        """What was given, or the loss of that name with its default options."""
        return cls(loss) if isinstance(loss, str) else loss


@dataclass(frozen=True, slots=True)
class LossCapabilities:
    """What a loss works on.

    Attributes:
        arrays: whose arrays it takes; must be the trainer's `loss_arrays`.
        reads: columns of the batch it needs, beside `loss_mask` and `row`, which it always gets.
        needs_entropy: it also needs the `entropy` column [T], which the trainer computes.
    """

    arrays: Literal["torch", "numpy"]
    reads: tuple[str, ...] = ()
    needs_entropy: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LossOutput:
    """What a loss returns for one micro-batch.

    Attributes:
        sum: the loss summed over what it counts; backward runs on it.
        weight: how much it counted (tokens, or sequences); the update divides by the total.
        metrics: name to (sum, weight); means are taken late, over micro-batches and ranks.
        grad: d sum / d log-probs, from numpy losses only (torch has autograd).
    """

    sum: Any
    weight: float
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    grad: Any = None


class Loss(Protocol):
    """A loss on per-token log-probs, never on logits.

    Called with `logprobs` [T] of the current weights for all response tokens of the micro-batch
    one after another, `columns` as `loss_columns` makes them (in arrays of the loss's library), and
    `config`, the loss plugin's validated options. Never called for a batch without rows.
    """

    def __call__(self, logprobs: Any, columns: Mapping[str, Any], config: Any) -> LossOutput:
        """The loss of one micro-batch."""
        ...


@dataclass(frozen=True, slots=True)
class ForwardBackwardInfo:
    """One micro-batch on all ranks.

    Attributes:
        loss_sum: loss before division by the weight.
        weight: what the loss counted.
        tokens: tokens computed, prompts included.
        rows: rows computed.
        metrics: name to (sum, weight).
    """

    loss_sum: float
    weight: float
    tokens: int
    rows: int
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """One optimizer update.

    Attributes:
        updates: updates since the first, this one included.
        grad_norm: of the mean gradient, before clipping.
        lr: learning rate that was used.
        weight: loss weight the gradient was divided by.
        applied: False when nothing was to be done (weight 0).
    """

    updates: int
    grad_norm: float
    lr: float
    weight: float
    applied: bool = True


@dataclass(frozen=True, slots=True)
class TrainerStats:
    """Work done: updates, tokens, seconds spent inside calls."""

    updates: int = 0
    tokens: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainerCapabilities:
    """What a trainer can do beyond the minimum.

    Attributes:
        loss_arrays: whose arrays its losses work on: "torch" or "numpy".
        max_world_size: most ranks; None without limit.
        truncated_sampling: it masks top-p, top-k, min-p as the sampler did.
        entropy: it gives losses an `entropy` column [T].
        sharded_export: every rank yields buckets; else rank 0 yields them all.
        overlapped_export: of a single rank, `export_weights` may run beside `forward` and
            `forward_backward`; the next `optim_step` waits for its end.
        model_export: it is a `SupportsModelExport`.
    """

    loss_arrays: Literal["torch", "numpy"] = "torch"
    max_world_size: int | None = 1
    truncated_sampling: bool = False
    entropy: bool = False
    sharded_export: bool = False
    overlapped_export: bool = False
    model_export: bool = False


class Trainer(Service):
    """One rank of a trainer. It owns parameters, gradients, optimizer state of its shard.

    All ranks get the same calls in the same order (`flow/working/fanout.py`). The loss is a sum
    with a weight, and `optim_step` divides by the weight summed over micro-batches and ranks,
    before clipping: one batch, k micro-batches or k ranks give the same update.
    """

    API_VERSION: ClassVar[int] = 1

    @abstractmethod
    async def forward(self, batch: Batch) -> Batch:
        """`logprobs` float32 [T] a row: of `response_ids`, at the row's temperature.

        Raises:
            DataError: a row was drawn with truncation and the trainer cannot mask the same.
        """

    @abstractmethod
    async def forward_backward(
        self, batch: Batch, loss: LossSpec | str, *, last: bool
    ) -> ForwardBackwardInfo:
        """Add one micro-batch's gradient; `last` says no other follows before `optim_step`.

        A loss is given by its name, or as a `LossSpec` with options (`LossSpec.of` takes both).
        An empty batch is allowed and adds nothing: ranks stay in step.
        """

    @abstractmethod
    async def optim_step(self) -> UpdateInfo:
        """Divide by the summed weight, clip, update, zero the gradients."""

    @abstractmethod
    async def zero_grad(self) -> None:
        """Throw the collected gradients and weights away."""

    @abstractmethod
    def export_weights(self, version: int) -> AsyncIterator[Bucket]:
        """The weights in Hugging Face names, bucket by bucket; all ranks call it.

        A bucket's buffer may be used again after the next one is asked for.
        """

    @abstractmethod
    async def save(self, path: str) -> None:
        """Write everything `load` needs to go on bit-equal, atomically, into a new directory."""

    @abstractmethod
    async def load(self, path: str) -> None:
        """Go on from what `save` wrote."""

    @abstractmethod
    async def stats(self) -> TrainerStats:
        """Work done."""


@runtime_checkable
class SupportsModelExport(Protocol):
    """A trainer that writes a Hugging Face model directory."""

    async def save_model(self, path: str) -> None:
        """Write config, safetensors weights and tokenizer; `transformers` loads the directory.

        All ranks call it, as they may hold a shard each; rank 0 writes.
        """


def loss_columns(batch: Batch, names: Iterable[str] = ()) -> dict[str, NDArray[Any]]:
    """The `columns` of a loss as numpy arrays; a torch trainer wraps them without a copy.

    Per-token columns are [T], all rows one after another; `versions` too, each token's version;
    dense columns are [B, ...]. `loss_mask` and `row`, int64 [T], are always there.
    `proximal_logprobs` are left out of a batch without them: at a step's only update they equal the
    current log-probs, which the loss has.

    Args:
        batch: a micro-batch with `response_ids`; T counts its response tokens, B its rows.
        names: the loss's `reads`.

    Raises:
        DataError: a column is missing, holds objects, or does not cover the response.
    """
    lengths = _column(batch, "response_ids").lengths
    columns: dict[str, NDArray[Any]] = {"row": np.repeat(np.arange(batch.rows), lengths)}
    for name in dict.fromkeys(("loss_mask", *names)):
        if name == "proximal_logprobs" and name not in batch:
            continue
        columns[name] = _loss_column(name, _column(batch, name), lengths)
    return columns


def _column(batch: Batch, name: str) -> Column:
    if name not in batch:
        raise DataError(f"the loss needs the column {name!r}, the batch has {sorted(batch)}")
    return batch[name]


def _loss_column(name: str, column: Column, lengths: NDArray[np.int64]) -> NDArray[Any]:
    if column.kind == "object":
        raise DataError(f"column {name!r} holds objects; a loss can only read numbers")
    if column.offsets is None:
        return column.array
    values, covered = column.array, column.lengths
    if name == "versions":
        runs = np.repeat(np.arange(len(column)), covered)
        covered = np.bincount(runs, values[:, 1], minlength=len(column)).astype(np.int64)
        values = np.repeat(values[:, 0], values[:, 1])
    wrong = np.flatnonzero(covered != lengths)
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"row {row} of the micro-batch: column {name!r} covers {covered[row]} tokens, "
            f"the response has {lengths[row]}; a loss reads per-token and per-row columns only"
        )
    return values
