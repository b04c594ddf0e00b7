"""The trainer without asyncio: everything that computes, for one thread."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncflow_core.batch import Batch, Column
from asyncflow_core.errors import DataError, EngineError, ServiceError
from asyncflow_core.losses import ResolvedLoss, resolve_loss
from asyncflow_core.parts import PartContext
from asyncflow_core.services.trainer import (
    ForwardBackwardInfo,
    LossSpec,
    UpdateInfo,
    loss_columns,
)
from asyncflow_core.services.weight_sync import Bucket
from asyncflow_hzp.checkpoint import new_directory, read_record, shared_directory, write_record
from asyncflow_hzp.export import aliases, buckets
from asyncflow_hzp.forward import (
    CausalForward,
    check_rows,
    pack,
    split_rows,
    temperatures,
)
from asyncflow_hzp.model import choose_device, load_model, max_positions, write_model
from asyncflow_hzp.options import HzpOptions
from asyncflow_hzp.passes import Sums, backward_zero, loss_of, nothing, number_of
from asyncflow_hzp.ranks import Ranks
from asyncflow_hzp.schedule import learning_rate
from asyncflow_hzp.sharding import Shards

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
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each rank sees all, and begins with the first
        self._ranks = Ranks(
            context.rank,
            context.world_size,
            device=self._device,
            timeout_s=options.collective_timeout_s,
        )
        try:
            self._model = load_model(options, self._device)
            self._forward = CausalForward(self._model)
            self._shards = Shards(self._model, options)
        except BaseException:
            self._ranks.close()
            raise
        self._max_length = max_positions(self._model)
        self._aliases = aliases(self._model)
        self._weight = 0.0
        self._pending = False
        self._torn = False
        self.left: Exception | None = None  # what made this rank leave the others
        self.updates = 0
        self.tokens = 0

    def forward(self, batch: Batch) -> Batch:
        """Log-probs of the responses, row by row; sharded parameters need it on all ranks."""
        parts, temperature = self._plan(batch)
        response = batch["response_ids"] if batch.rows else Column.ragged([], np.float32)
        logprobs = np.empty(len(response.array), np.float32)
        with torch.no_grad(), self._in_step(self._shards.meets):
            for rows, part in parts:
                if not part.rows:
                    self._forward(nothing(self._device))
                    continue
                packed = pack(part, _of_rows(temperature, rows), self._device)
                values = self._forward(packed)[0].cpu().numpy()
                ends = np.cumsum(part["response_ids"].lengths)[:-1]
                for row, value in zip(rows.tolist(), np.split(values, ends), strict=True):
                    start = response.offsets[row]  # type: ignore[index]  # ragged: checked
                    logprobs[start : start + len(value)] = value
                self.tokens += _tokens(part)
        return Batch({"logprobs": Column(logprobs, response.offsets)})

    def forward_backward(
        self, batch: Batch, spec: LossSpec, *, last: bool = False
    ) -> ForwardBackwardInfo:
        """Add a batch's gradient, in as many forwards as memory asks for."""
        self._check_trains("forward_backward")
        loss = self._loss(spec)
        parts, temperature = self._plan(batch, loss.capabilities.reads)
        if not parts:
            return ForwardBackwardInfo(0.0, 0.0, 0, 0)
        self._pending, self._torn = True, True
        found = Sums()
        with self._in_step(self._shards.meets):
            for number, (rows, part) in enumerate(parts):
                self._shards.prepare_gradients(last=last and number == len(parts) - 1)
                if part.rows and found.failure is None:
                    found.add(self._backward(part, _of_rows(temperature, rows), loss))
                else:
                    self._backward_nothing()
        if found.failure is not None:
            raise found.failure
        self._torn = False
        self._weight += found.weight
        tokens = _tokens(batch) if batch.rows else 0
        self.tokens += tokens
        return ForwardBackwardInfo(found.total, found.weight, tokens, batch.rows, found.metrics)

    def _backward(
        self, part: Batch, temperature: NDArray[np.float32] | None, loss: ResolvedLoss
    ) -> tuple[float, float, dict[str, tuple[float, float]]] | Exception:
        """One forward and backward; a loss that fails still takes part in what ranks share."""
        entropies = loss.capabilities.needs_entropy
        logprobs, entropy = self._forward(pack(part, temperature, self._device), entropy=entropies)
        try:
            result = loss_of(part, loss, logprobs, entropy, self.updates + 1)
        except Exception as error:
            if not self._shards.meets:
                raise
            backward_zero(logprobs)
            return error
        if getattr(result.sum, "requires_grad", False):
            result.sum.backward()
        elif self._shards.meets:
            backward_zero(logprobs)
        return number_of(result.sum), number_of(result.weight), result.metrics

    def _backward_nothing(self) -> None:
        """Take part in the gathers and reductions of a pass in which this rank has no rows."""
        logprobs, _ = self._forward(nothing(self._device))
        backward_zero(logprobs)

    def _plan(
        self, batch: Batch, reads: tuple[str, ...] | None = None
    ) -> tuple[list[tuple[NDArray[np.int64], Batch]], NDArray[np.float32] | None]:
        """The rows of each forward and their columns, and all rows' temperatures.

        Where ranks meet in each forward, equally many on all of them, the last ones empty. What
        cannot be computed is refused before anything is, on all ranks.

        Args:
            batch: all rows.
            reads: columns the loss reads; None for a forward alone.
        """
        parts: list[tuple[NDArray[np.int64], Batch]] = []
        temperature: NDArray[np.float32] | None = None
        failure: Exception | None = None
        if batch.rows:
            try:
                temperature, names = self._check(batch), dict.fromkeys(_SEQUENCE)
                if reads is not None:
                    loss_columns(batch, reads)
                    names |= dict.fromkeys(
                        ("loss_mask", *(name for name in reads if name in batch))
                    )
                parts = list(self._parts(batch, tuple(names)))
            except Exception as error:  # noqa: BLE001 - the others must hear of it first
                failure = error
        if self._shards.meets:
            most = self._ranks.most(len(parts), failed=failure is not None)
            parts += [(np.arange(0), Batch({}, rows=0))] * (most - len(parts))
        if failure is not None:
            raise failure
        return parts, temperature

    def optim_step(self) -> UpdateInfo:
        """Reduce over ranks, divide by the weight, clip, update."""
        self._check_trains("optim_step")
        number = self.updates + 1
        failure: ServiceError | None = None
        if self._torn:
            failure = ServiceError(
                f"a forward_backward of update {number} failed half-way; call zero_grad and "
                f"repeat the update"
            )
        weight = self._ranks.total(self._weight, failure)
        lr = learning_rate(self._options, self.updates)
        if weight <= 0.0:
            self.zero_grad()
            return UpdateInfo(self.updates, 0.0, lr, 0.0, applied=False)
        norm = self._shards.gradient_norm() / weight
        if not math.isfinite(norm):
            self.zero_grad()
            raise EngineError(
                f"update {number}: the gradient's norm is {norm}; nothing was updated and the "
                f"gradients are thrown away; check the learning rate and the batch"
            )
        clip = self._options.grad_clip
        scale = 1.0 if clip is None or norm <= clip else clip / norm
        with self._in_step(True):
            self._shards.step(lr=lr, scale=scale / weight)
        self.updates = number
        self._weight, self._pending = 0.0, False
        return UpdateInfo(number, norm, lr, weight)

    @contextmanager
    def _in_step(self, meets: bool) -> Iterator[None]:
        """Work that other ranks wait for: who fails in it leaves them, which ends their wait.

        It could not catch up: it has sent fewer of the pieces that they expect, in this order.
        """
        try:
            yield
        except Exception as error:
            if meets and self._ranks.size > 1:
                self.left = error
                self.close()
            raise

    def zero_grad(self) -> None:
        """Forget gradients and weights."""
        self._shards.zero_gradients()
        self._weight, self._pending, self._torn = 0.0, False, False

    def export(self) -> Generator[Bucket, None, None]:
        """The weights as buckets, from rank 0 or a share from each rank.

        The model must not be updated meanwhile. Where parameters are sharded all ranks take part, a
        unit at a time.
        """
        tensors = self._shards.exported()
        rank = self._ranks.rank
        sharers = self._ranks.size if self._options.sharded_export else 1
        chosen = (pair for number, pair in enumerate(tensors) if number % sharers == rank)
        updates = self.updates
        try:
            if rank < sharers:
                for bucket in buckets(chosen, self._aliases, size=self._options.bucket_bytes):
                    if self.updates != updates:
                        raise ServiceError(
                            f"the weights changed from update {updates} to {self.updates} while "
                            f"they were exported; end an export before the next optim_step"
                        )
                    yield bucket
        finally:
            # An export that is given up half-way still gathers what the others gather.
            for _ in tensors if self._shards.meets else ():
                pass

    def save(self, path: str) -> None:
        """Write a checkpoint; between updates only, since gradients are not part of it."""
        self._check_trains("save")
        failure: ServiceError | None = None
        if self._pending:
            failure = ServiceError(
                "a checkpoint cannot hold half an update; call optim_step or zero_grad before save"
            )
        self._ranks.agree(failure)
        counters = {"updates": self.updates, "tokens": self.tokens}
        with shared_directory(path, self._ranks) as directory:
            record = self._shards.save(directory, moments=self.updates > 0)
            if self._ranks.rank == 0:
                write_record(directory, {**record, **counters})

    def load(self, path: str) -> None:
        """Go on from a checkpoint; gradients collected so far are thrown away."""
        self._check_trains("load")
        record: dict[str, Any] = {}
        failure: DataError | None = None
        try:
            record = read_record(path)
        except DataError as error:
            failure = error
        self._ranks.agree(failure)
        self.zero_grad()
        self._shards.load(Path(path), record)
        self.updates, self.tokens = record["updates"], record["tokens"]

    def save_model(self, path: str) -> None:
        """Write a Hugging Face model directory."""
        self._shards.settle()
        weights = None
        if self._shards.meets:
            weights = self._shards.buffers()
            for name, tensor in self._shards.exported():
                if self._ranks.rank == 0:
                    weights[name] = tensor.to("cpu", copy=True)

        def write() -> None:
            with new_directory(path) as directory:
                write_model(self._model, Path(self._options.model), directory, weights)

        self._ranks.lead(write)

    def close(self) -> None:
        """Leave the other ranks."""
        self._shards.close()
        self._ranks.close()

    def _check_trains(self, call: str) -> None:
        if self._options.frozen:
            raise ServiceError(
                f"{call} was called on a frozen trainer, which has forward and exports only; give "
                f"the option frozen: false to train {self._options.model!r}",
                service=self._context.name,
            )

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
