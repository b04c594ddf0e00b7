"""The `hzp` trainer as a service: the engine behind one thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from asyncflow_core.batch import Batch
from asyncflow_core.errors import AsyncFlowError, EngineError, ServiceClosedError, ServiceError
from asyncflow_core.parts import PartContext
from asyncflow_core.services.trainer import (
    ForwardBackwardInfo,
    LossSpec,
    Trainer,
    TrainerStats,
    UpdateInfo,
)
from asyncflow_core.services.weight_sync import Bucket
from asyncflow_hzp.engine import HzpEngine
from asyncflow_hzp.options import HzpOptions

__all__ = ["HzpTrainer"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class HzpTrainer(Trainer):
    """Trains a Hugging Face causal language model with AdamW, data-parallel over its ranks.

    It owns the model's memory, its gradients and its optimizer state. A loss may declare that it
    needs the entropy. Rows drawn with top-p, top-k or min-p are refused.

    Concurrency: calls run one after another on the trainer's own thread. A cancelled call still
    runs to its end there, and the next one waits for it: after a cancelled `forward_backward` call
    `zero_grad`.
    """

    def __init__(self, options: HzpOptions, context: PartContext) -> None:
        """Keep the arguments."""
        self._options = options
        self._context = context
        self._thread: ThreadPoolExecutor | None = None
        self._engine: HzpEngine | None = None
        self._busy_s = 0.0

    async def open(self) -> None:
        """Load the model and, with other ranks, join them."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self._context.name or "hzp")
        self._engine = await self._call(lambda: HzpEngine(self._options, self._context))

    async def aclose(self) -> None:
        """Wait for what runs, then give everything back."""
        thread, engine = self._thread, self._engine
        self._thread, self._engine = None, None
        if thread is None:
            return
        closing = None if engine is None else thread.submit(engine.close)
        await asyncio.to_thread(thread.shutdown)
        if closing is not None and (error := closing.exception()) is not None:
            # The trainer is gone either way; who closes it has nothing left to do about it.
            logger.warning("trainer %s closed badly", self._context.name, exc_info=error)

    async def forward(self, batch: Batch) -> Batch:
        """Log-probs of the responses; see `Trainer.forward`."""
        engine = self._opened()
        return await self._call(lambda: engine.forward(batch))

    async def forward_backward(
        self, batch: Batch, loss: LossSpec | str, *, last: bool
    ) -> ForwardBackwardInfo:
        """Add a micro-batch's gradient; see `Trainer.forward_backward`.

        `last` lets gradients travel while the others are computed; without it they do in
        `optim_step`.
        """
        engine = self._opened()
        return await self._call(
            lambda: engine.forward_backward(batch, LossSpec.of(loss), last=last)
        )

    async def optim_step(self) -> UpdateInfo:
        """Update; see `Trainer.optim_step`.

        Raises:
            EngineError: the gradient is not finite; nothing was updated, the gradients are zero.
            ServiceError: an earlier `forward_backward` of this update failed half-way.
        """
        return await self._call(self._opened().optim_step)

    async def zero_grad(self) -> None:
        """Throw the collected gradients and weights away."""
        await self._call(self._opened().zero_grad)

    async def export_weights(self, version: int) -> AsyncIterator[Bucket]:
        """Rank 0 yields the weights through one reused buffer; see `Trainer.export_weights`.

        Raises:
            ServiceError: an update ran between two buckets.
        """
        buckets = self._opened().export()
        try:
            while True:
                bucket = await self._call(lambda: next(buckets, None))
                if bucket is None:
                    return
                yield bucket
        finally:
            if self._thread is not None:
                await self._call(buckets.close)

    async def save(self, path: str) -> None:
        """Write a checkpoint; see `Trainer.save`.

        Raises:
            ServiceError: gradients are collected, or `path` is there already.
        """
        engine = self._opened()
        await self._call(lambda: engine.save(path))

    async def load(self, path: str) -> None:
        """Go on from a checkpoint.

        Raises:
            DataError: there is none, or it is of another model; nothing was changed.
        """
        engine = self._opened()
        await self._call(lambda: engine.load(path))

    async def save_model(self, path: str) -> None:
        """Write a directory that `transformers` loads, with the tokenizer of the source model."""
        engine = self._opened()
        await self._call(lambda: engine.save_model(path))

    async def stats(self) -> TrainerStats:
        """Work done."""
        engine = self._opened()
        return TrainerStats(engine.updates, engine.tokens, self._busy_s)

    def _opened(self) -> HzpEngine:
        if self._engine is None:
            raise ServiceClosedError(
                f"trainer {self._context.name or 'hzp'} is not open", service=self._context.name
            )
        if self._engine.left is not None:
            raise ServiceError(
                f"this rank left the others after it failed ({self._engine.left}); open all ranks "
                f"again",
                service=self._context.name,
            )
        return self._engine

    async def _call(self, work: Callable[[], T]) -> T:
        """Run on the trainer's thread; whatever the engine raises crosses here, once."""

        def timed() -> T:
            start = time.perf_counter()
            try:
                return work()
            except AsyncFlowError:
                raise
            except Exception as error:
                raise EngineError(
                    f"trainer failed: {type(error).__name__}: {error}", service=self._context.name
                ) from error
            finally:
                self._busy_s += time.perf_counter() - start

        assert self._thread is not None
        return await asyncio.get_running_loop().run_in_executor(self._thread, timed)
