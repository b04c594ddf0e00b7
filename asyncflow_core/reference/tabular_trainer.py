"""A trainer of the tabular policy: exact gradients, data parallel over ranks, SGD or Adam."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from asyncflow_core.batch import Batch, Column
from asyncflow_core.errors import (
    DataError,
    EngineError,
    InvariantError,
    ServiceClosedError,
    ServiceError,
)
from asyncflow_core.losses import ResolvedLoss, resolve_loss
from asyncflow_core.parts import PartContext
from asyncflow_core.reference.checkpoint import read_checkpoint, write_checkpoint
from asyncflow_core.reference.collective import Collective
from asyncflow_core.reference.tabular import TabularModel, TabularOptions, log_softmax
from asyncflow_core.reference.tabular_weights import write_weights
from asyncflow_core.services.rollout import SamplingParams
from asyncflow_core.services.trainer import (
    ForwardBackwardInfo,
    LossSpec,
    Trainer,
    TrainerCapabilities,
    TrainerStats,
    UpdateInfo,
    loss_columns,
)
from asyncflow_core.services.weight_sync import Bucket

__all__ = ["TABULAR_TRAINER", "TabularTrainer", "TabularTrainerOptions", "tabular_trainer"]

TABULAR_TRAINER = TrainerCapabilities(loss_arrays="numpy", max_world_size=None)

Floats = NDArray[np.float64]


class TabularTrainerOptions(TabularOptions):
    """Options of the tabular trainer."""

    lr: float = Field(default=1.0, ge=0.0)
    """Learning rate."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """How the gradient becomes an update."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Adam's decay of the mean gradient."""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Adam's decay of the mean squared gradient."""
    epsilon: float = Field(default=1e-8, gt=0.0)
    """Added to Adam's divisor."""
    max_grad_norm: float | None = Field(default=None, gt=0.0)
    """The mean gradient is scaled down to this norm; None leaves it."""
    bucket_bytes: int = Field(default=1 << 20, ge=1)
    """Size of an exported bucket; a larger tensor goes alone."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """Longest wait for another rank."""
    sharded_export: bool = False
    """Whether every rank yields a share of the tensors; else rank 0 yields all."""


def tabular_trainer(options: TabularTrainerOptions) -> TrainerCapabilities:
    """What it can do with these options."""
    return replace(TABULAR_TRAINER, sharded_export=options.sharded_export)


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """The response tokens of a batch [T], and what they were drawn from."""

    ids: NDArray[np.int32]
    contexts: NDArray[np.int64]
    temperatures: Floats


class TabularTrainer(Trainer):
    """One rank. It owns the whole model and optimizer state; only gradients are summed over ranks.

    Files are read and written on a thread; everything else runs on the event loop.
    """

    def __init__(self, options: TabularTrainerOptions, ctx: PartContext) -> None:
        """Keep the options; the model is made by `open`."""
        self._options, self._ctx = options, ctx
        self._name = ctx.name or "tabular"
        self._collective = Collective(
            # Ranks are called trainer-0, trainer-1: what stands before is the name they share.
            name=self._name.removesuffix(f"-{ctx.rank}"),
            rank=ctx.rank,
            world_size=ctx.world_size,
            run_dir=ctx.run_dir,
            timeout_s=options.timeout_s,
        )
        self._losses: list[tuple[LossSpec, ResolvedLoss]] = []
        self._model: TabularModel | None = None

    async def open(self) -> None:
        """Make the model; equal on all ranks."""
        if self._model is not None:
            return
        await self._collective.open()
        self._model = TabularModel(self._options, self._ctx)
        self._moments = np.zeros((2, *self._model.logits.shape))
        self._grad = np.zeros_like(self._model.logits)
        self._weight = 0.0
        self._updates = self._tokens = 0
        self._busy_s = 0.0

    async def aclose(self) -> None:
        """Leave the other ranks; idempotent."""
        self._model = None
        await self._collective.aclose()

    def _opened(self) -> TabularModel:
        if self._model is None:
            raise ServiceClosedError(f"{self._name} is not open", service=self._name)
        return self._model

    @contextmanager
    def _busy(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._busy_s += time.perf_counter() - started

    async def forward(self, batch: Batch) -> Batch:
        """Exact log-probs at each row's temperature (1 for a greedy row)."""
        model = self._opened()
        with self._busy():
            if not batch.rows:
                return Batch({"logprobs": Column.ragged([], np.float32)})
            tokens = _tokens(model, batch)
            self._tokens += _count(batch)
            logprobs = _logprobs(model, tokens)[np.arange(len(tokens.ids)), tokens.ids]
            offsets = batch["response_ids"].offsets
            return Batch({"logprobs": Column(logprobs.astype(np.float32), offsets)})

    async def forward_backward(
        self, batch: Batch, loss: LossSpec | str, *, last: bool
    ) -> ForwardBackwardInfo:
        """Add one micro-batch's gradient; ranks meet in `optim_step`, so `last` changes nothing."""
        loss = LossSpec.of(loss)
        model, resolved = self._opened(), self._resolve(loss)
        if not batch.rows:
            return ForwardBackwardInfo(loss_sum=0.0, weight=0.0, tokens=0, rows=0)
        with self._busy():
            tokens = _tokens(model, batch)
            columns = loss_columns(batch, resolved.capabilities.reads)
            logprobs = _logprobs(model, tokens)
            at = np.arange(len(tokens.ids)), tokens.ids
            output = resolved(logprobs[at], columns)
            grad = np.asarray(output.grad)
            if grad.shape != tokens.ids.shape:
                raise InvariantError(
                    f"loss {loss.name!r} gave a gradient of shape {grad.shape} "
                    f"for {len(tokens.ids)} tokens"
                )
            # d logprob / d logit = ((1 where it is the token, else 0) - probability) / temperature
            scale = grad / tokens.temperatures
            contribution = -scale[:, None] * np.exp(logprobs)
            contribution[at] += scale
            np.add.at(self._grad.reshape(model.rows.shape), tokens.contexts, contribution)
            self._weight += output.weight
            counted = _count(batch)
            self._tokens += counted
        return ForwardBackwardInfo(
            float(output.sum), output.weight, counted, batch.rows, dict(output.metrics)
        )

    def _resolve(self, spec: LossSpec) -> ResolvedLoss:
        for known, resolved in self._losses:
            if known == spec:
                return resolved
        resolved = resolve_loss(self._ctx.registry, spec, arrays="numpy", ctx=self._ctx)
        self._losses.append((spec, resolved))
        return resolved

    async def optim_step(self) -> UpdateInfo:
        """Sum over ranks, divide by the weight, clip, update; equal bits on all ranks.

        Raises:
            ServiceTimeoutError: naming the ranks that did not come; gradients are kept.
            EngineError: the gradient is not finite; gradients are kept, parameters untouched.
        """
        model, options = self._opened(), self._options
        with self._busy():
            mine = np.append(self._grad.reshape(-1), self._weight)
            total = await self._collective.all_reduce(mine)
            weight = float(total[-1])
            if weight == 0.0:
                self._zero()
                return UpdateInfo(self._updates, 0.0, options.lr, 0.0, applied=False)
            grad = (total[:-1] / weight).reshape(self._grad.shape)
            norm = float(np.linalg.norm(grad))
            if not np.isfinite(norm):
                raise EngineError(f"{self._name}: the gradient is {norm}", service=self._name)
            if options.max_grad_norm is not None and norm > options.max_grad_norm:
                grad *= options.max_grad_norm / norm
            self._updates += 1
            model.logits = model.logits - options.lr * self._direction(grad)
            self._zero()
            return UpdateInfo(self._updates, norm, options.lr, weight)

    def _direction(self, grad: Floats) -> Floats:
        options = self._options
        if options.optimizer == "sgd":
            return grad
        decays = (options.beta1, options.beta2)
        for moment, decay, value in zip(self._moments, decays, (grad, grad * grad), strict=True):
            moment *= decay
            moment += (1.0 - decay) * value
        mean, square = (
            moment / (1.0 - decay**self._updates)
            for moment, decay in zip(self._moments, decays, strict=True)
        )
        direction: Floats = mean / (np.sqrt(square) + options.epsilon)
        return direction

    async def zero_grad(self) -> None:
        """Throw the collected gradients and weights away."""
        self._opened()
        self._zero()

    def _zero(self) -> None:
        self._grad[...] = 0.0
        self._weight = 0.0

    async def export_weights(self, version: int) -> AsyncIterator[Bucket]:
        """A tensor a position; rank 0 yields all, or each rank every `world_size`-th."""
        model = self._opened()
        if version < 0:
            raise DataError(f"version {version} cannot be exported; versions count from 0")
        rank, share = self._ctx.rank, 1
        if self._options.sharded_export:
            share = self._ctx.world_size
        if rank < share:
            wanted = model.specs()[rank::share]
            for bucket in write_weights(model, self._options.bucket_bytes, wanted):
                yield bucket

    async def save(self, path: str) -> None:
        """Rank 0 writes, between updates; the state is equal on all ranks.

        Raises:
            ServiceError: gradients are collected, or the directory is there already.
        """
        model = self._opened()
        if self._weight or self._grad.any():
            raise ServiceError(
                f"{self._name} holds gradients of an update not made; save before or after it",
                service=self._name,
            )
        if self._ctx.rank == 0:
            arrays = {"logits": model.logits, "moments": self._moments.copy()}
            record = {"updates": self._updates, "optimizer": self._options.optimizer}
            await asyncio.to_thread(write_checkpoint, Path(path), arrays, record)

    async def load(self, path: str) -> None:
        """Every rank reads the same files; collected gradients are thrown away."""
        model = self._opened()
        shapes = {"logits": model.logits.shape, "moments": self._moments.shape}
        arrays, record = await asyncio.to_thread(read_checkpoint, Path(path), shapes)
        updates, optimizer = record.get("updates"), record.get("optimizer")
        if not isinstance(updates, int) or optimizer != self._options.optimizer:
            raise DataError(
                f"{path} is of the optimizer {optimizer!r} after {updates!r} updates, "
                f"this trainer runs {self._options.optimizer!r}"
            )
        model.logits, self._moments, self._updates = arrays["logits"], arrays["moments"], updates
        self._zero()

    async def stats(self) -> TrainerStats:
        """Work done."""
        self._opened()
        return TrainerStats(self._updates, self._tokens, self._busy_s)


def _count(batch: Batch) -> int:
    return len(batch["prompt_ids"].array) + len(batch["response_ids"].array)


def _tokens(model: TabularModel, batch: Batch) -> _Tokens:
    prompts, responses = batch["prompt_ids"], batch["response_ids"]
    model.check_ids(prompts.array, "column 'prompt_ids'")
    model.check_ids(responses.array, "column 'response_ids'")
    temperatures = np.ones(batch.rows)
    if "sampling" not in batch:
        raise DataError("the trainer needs the column 'sampling' for each row's temperature")
    for row, entry in enumerate(batch["sampling"]):
        sampling = SamplingParams.from_row(entry)
        if sampling.truncates:
            raise DataError(
                f"row {row} of the batch was drawn with top_p {sampling.top_p}, top_k "
                f"{sampling.top_k}, min_p {sampling.min_p}; the tabular trainer cannot mask the "
                f"same: sample with temperature only"
            )
        temperatures[row] = sampling.temperature or 1.0
    contexts = [model.contexts(p, r) for p, r in zip(prompts, responses, strict=True)]
    return _Tokens(
        responses.array, np.concatenate(contexts), np.repeat(temperatures, responses.lengths)
    )


def _logprobs(model: TabularModel, tokens: _Tokens) -> Floats:
    return log_softmax(model.rows[tokens.contexts] / tokens.temperatures[:, None])
