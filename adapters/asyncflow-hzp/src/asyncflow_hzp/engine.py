"""The trainer without asyncio: everything that computes, for one thread."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncflow_core.batch import Batch, Column
from asyncflow_core.errors import EngineError, ServiceError
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import ResolvedLoss, resolve_loss
from asyncflow_core.services.trainer import (
    ForwardBackwardInfo,
    LossSpec,
    UpdateInfo,
    loss_columns,
)
from asyncflow_core.services.weight_sync import Bucket
from asyncflow_hzp.checkpoint import new_directory, read_checkpoint, write_checkpoint
from asyncflow_hzp.export import aliases, buckets
from asyncflow_hzp.forward import CausalForward, check_rows, pack, split_rows, temperatures
from asyncflow_hzp.model import choose_device, load_model, max_positions, write_model
from asyncflow_hzp.options import HzpOptions
from asyncflow_hzp.ranks import Ranks
from asyncflow_hzp.schedule import learning_rate
from asyncflow_hzp.sharding import Replicated, Sharded

__all__ = ["HzpEngine"]

_SEQUENCE = ("prompt_ids", "response_ids")


class HzpEngine:
    """One rank's model, gradients and optimizer. Loads the model when built."""

    def __init__(self, options: HzpOptions, context: PartContext) -> None:
        torch.set_num_threads(options.threads)
        self._options = options
        self._context = context
        self._losses: dict[str, ResolvedLoss] = {}
        self._device = choose_device(options.device)
        self._ranks = Ranks(
            context.rank,
            context.world_size,
            device=self._device,
            timeout_s=options.collective_timeout_s,
        )
        try:
            self._model = load_model(options, self._device)
            self._forward = CausalForward(self._model)
        except BaseException:
            self._ranks.close()
            raise
        self._max_length = max_positions(self._model)
        self._sharded: Sharded = Replicated(self._model, options, self._ranks)
        self._weight = 0.0
        self._pending = False
        self._torn = False
        self.updates = 0
        self.tokens = 0

    def forward(self, batch: Batch) -> Batch:
        """Log-probs of the responses, row by row."""
        if not batch.rows:
            return Batch({"logprobs": Column.ragged([], np.float32)})
        temperature = self._check(batch)
        response = batch["response_ids"]
        logprobs = np.empty(len(response.array), np.float32)
        with torch.no_grad():
            for rows, part in self._parts(batch, _SEQUENCE):
                packed = pack(part, _of_rows(temperature, rows), self._device)
                values = self._forward(packed)[0].cpu().numpy()
                ends = np.cumsum(part["response_ids"].lengths)[:-1]
                for row, value in zip(rows.tolist(), np.split(values, ends), strict=True):
                    start = response.offsets[row]  # type: ignore[index]  # ragged: checked
                    logprobs[start : start + len(value)] = value
                self.tokens += _tokens(part)
        return Batch({"logprobs": Column(logprobs, response.offsets)})

    def forward_backward(self, batch: Batch, spec: LossSpec) -> ForwardBackwardInfo:
        """Add a batch's gradient, in as many forwards as memory asks for."""
        if not batch.rows:
            return ForwardBackwardInfo(0.0, 0.0, 0, 0)
        temperature = self._check(batch)
        loss = self._loss(spec)
        loss_columns(batch, loss.capabilities.reads)  # refuse before anything is added
        self._sharded.prepare_gradients()
        names = dict.fromkeys((*_SEQUENCE, "loss_mask", *loss.capabilities.reads))
        self._pending, self._torn = True, True
        total, weight, metrics = 0.0, 0.0, dict[str, tuple[float, float]]()
        for rows, part in self._parts(batch, tuple(names)):
            value, counted, more = self._backward(part, _of_rows(temperature, rows), loss)
            total, weight = total + value, weight + counted
            for name, (number, over) in more.items():
                before = metrics.get(name, (0.0, 0.0))
                metrics[name] = (before[0] + _number(number), before[1] + _number(over))
        self._torn = False
        self._weight += weight
        tokens = _tokens(batch)
        self.tokens += tokens
        return ForwardBackwardInfo(total, weight, tokens, batch.rows, metrics)

    def _backward(
        self, part: Batch, temperature: NDArray[np.float32] | None, loss: ResolvedLoss
    ) -> tuple[float, float, dict[str, tuple[float, float]]]:
        entropies = loss.capabilities.needs_entropy
        logprobs, entropy = self._forward(pack(part, temperature, self._device), entropy=entropies)
        columns: dict[str, Any] = {
            name: torch.from_numpy(_writable(array)).to(self._device)
            for name, array in loss_columns(part, loss.capabilities.reads).items()
        }
        if entropy is not None:
            columns["entropy"] = entropy
        result = loss(logprobs, columns)
        value, weight = _number(result.sum), _number(result.weight)
        if not math.isfinite(value) or not math.isfinite(weight) or weight < 0:
            raise EngineError(
                f"loss {loss.name!r} gave the sum {value} and weight {weight} in update "
                f"{self.updates + 1}; both must be finite, the weight not negative"
            )
        if getattr(result.sum, "requires_grad", False):
            result.sum.backward()
        elif value:
            raise EngineError(
                f"loss {loss.name!r} gave the sum {value} without a gradient; compute it from "
                f"the log-probs it is given"
            )
        return value, weight, result.metrics

    def optim_step(self) -> UpdateInfo:
        """Reduce over ranks, divide by the weight, clip, update."""
        number = self.updates + 1
        if self._torn:
            raise ServiceError(
                f"a forward_backward of update {number} failed half-way; call zero_grad and "
                f"repeat the update"
            )
        weight = self._sharded.reduce_gradients(self._weight)
        lr = learning_rate(self._options, self.updates)
        if weight <= 0.0:
            self.zero_grad()
            return UpdateInfo(self.updates, 0.0, lr, 0.0, applied=False)
        norm = self._sharded.gradient_norm() / weight
        if not math.isfinite(norm):
            self.zero_grad()
            raise EngineError(
                f"update {number}: the gradient's norm is {norm}; nothing was updated and the "
                f"gradients are thrown away; check the learning rate and the batch"
            )
        clip = self._options.grad_clip
        scale = 1.0 if clip is None or norm <= clip else clip / norm
        self._sharded.step(lr=lr, scale=scale / weight)
        self.updates = number
        self._weight, self._pending = 0.0, False
        return UpdateInfo(number, norm, lr, weight)

    def zero_grad(self) -> None:
        """Forget gradients and weights."""
        self._sharded.zero_gradients()
        self._weight, self._pending, self._torn = 0.0, False, False

    def export(self) -> Iterator[Bucket]:
        """The weights as buckets, from rank 0; the model must not be updated meanwhile."""
        if self._ranks.rank:
            return
        updates = self.updates
        size = self._options.bucket_bytes
        for bucket in buckets(self._sharded.exported(), aliases(self._model), size=size):
            if self.updates != updates:
                raise ServiceError(
                    f"the weights changed from update {updates} to {self.updates} while they were "
                    f"exported; end an export before the next optim_step"
                )
            yield bucket

    def save(self, path: str) -> None:
        """Write a checkpoint; between updates only, since gradients are not part of it."""
        if self._pending:
            raise ServiceError(
                "a checkpoint cannot hold half an update; call optim_step or zero_grad before save"
            )
        state = self._sharded.state()

        def write() -> None:
            with new_directory(path) as directory:
                write_checkpoint(directory, state, {"updates": self.updates, "tokens": self.tokens})

        self._ranks.lead(write)

    def load(self, path: str) -> None:
        """Go on from a checkpoint; gradients collected so far are thrown away."""
        state, counters = read_checkpoint(path)
        self._sharded.load_state(state, steps=counters["updates"])
        self.zero_grad()
        self.updates, self.tokens = counters["updates"], counters["tokens"]

    def save_model(self, path: str) -> None:
        """Write a Hugging Face model directory."""

        def write() -> None:
            with new_directory(path) as directory:
                write_model(self._model, Path(self._options.model), directory)

        self._ranks.lead(write)

    def close(self) -> None:
        """Leave the other ranks."""
        self._ranks.close()

    def _check(self, batch: Batch) -> NDArray[np.float32] | None:
        """Refuse bad rows; returns their temperatures."""
        check_rows(batch, vocab_size=self._forward.vocab_size, max_length=self._max_length)
        return temperatures(batch)

    def _parts(
        self, batch: Batch, names: tuple[str, ...]
    ) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """The rows of each forward, and their columns of these names."""
        chosen = batch.select(names)
        lengths = batch["prompt_ids"].lengths + batch["response_ids"].lengths
        parts = split_rows(lengths, self._options.micro_batch_tokens)
        for rows in parts:
            yield rows, chosen if len(parts) == 1 else chosen.take(rows)

    def _loss(self, spec: LossSpec) -> ResolvedLoss:
        key = f"{spec.name} {sorted(spec.options.items())!r}"
        if key not in self._losses:
            self._losses[key] = resolve_loss(
                self._context.registry, spec, arrays="torch", entropy=True, ctx=self._context
            )
        return self._losses[key]


def _tokens(batch: Batch) -> int:
    return sum(len(batch[name].array) for name in _SEQUENCE)


def _of_rows(
    values: NDArray[np.float32] | None, rows: NDArray[np.int64]
) -> NDArray[np.float32] | None:
    return None if values is None else values[rows]


def _number(value: Any) -> float:
    """A loss may give floats or tensors, with a gradient or not."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """Received columns are read-only, which torch does not know."""
    return array if array.flags.writeable else array.copy()
