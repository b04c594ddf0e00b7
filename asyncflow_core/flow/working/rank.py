"""One rank of an SPMD trainer: it takes part in each call, and reads its rows itself.

One that cannot read its rows takes part in the call without any before it fails: the others may be
waiting for it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

from asyncflow_core.batch import Batch, BatchRef
from asyncflow_core.errors import EngineError, InvariantError
from asyncflow_core.flow.processes.control import RankControl
from asyncflow_core.services.data_store import DataStore
from asyncflow_core.services.trainer import (
    ForwardBackwardInfo,
    LossSpec,
    SupportsModelExport,
    Trainer,
    UpdateInfo,
)
from asyncflow_core.services.weight_sync import (
    Bucket,
    PublishedWeights,
    SupportsOverlappedFetch,
    WeightSync,
)

__all__ = ["TrainerRank"]

T = TypeVar("T")


class TrainerRank(RankControl):
    """One rank: its trainer, its own way to the store, and to the replicas if it yields weights."""

    def __init__(
        self, trainer: Trainer, store: DataStore, weight_sync: WeightSync | None = None
    ) -> None:
        """Wrap an opened trainer, store and weight sync."""
        self._trainer = trainer
        self._store = store
        self._weight_sync = weight_sync
        self._order = 0

    async def forward(self, order: int, rows: Sequence[BatchRef], columns: Sequence[str]) -> Batch:
        """Read the rows, compute their columns."""
        self._in_order(order)
        batch, failure = await self._read(rows, columns)
        found = _checked(await self._trainer.forward(batch), Batch, "forward")
        if failure is not None:
            raise failure
        return found

    async def forward_backward(
        self,
        order: int,
        rows: Sequence[BatchRef],
        columns: Sequence[str],
        loss: LossSpec,
        *,
        last: bool,
    ) -> ForwardBackwardInfo:
        """Read the rows, add their gradient."""
        self._in_order(order)
        batch, failure = await self._read(rows, columns)
        info = await self._trainer.forward_backward(batch, loss, last=last)
        info = _checked(info, ForwardBackwardInfo, "forward_backward")
        if failure is not None:
            raise failure
        return info

    async def _read(
        self, rows: Sequence[BatchRef], columns: Sequence[str]
    ) -> tuple[Batch, Exception | None]:
        """The rows, one reference after another; or none, and what to raise after the call."""
        nothing = Batch({}, rows=0)  # no rows have no columns
        try:
            parts = [await self._store.read(ref, columns) for ref in rows]
            return (Batch.concat(parts) if parts else nothing), None
        except Exception as error:  # noqa: BLE001 - the other ranks come first
            return nothing, error

    async def optim_step(self, order: int) -> UpdateInfo:
        """Update."""
        self._in_order(order)
        return _checked(await self._trainer.optim_step(), UpdateInfo, "optim_step")

    async def zero_grad(self, order: int) -> None:
        """Throw collected gradients away."""
        self._in_order(order)
        await self._trainer.zero_grad()

    async def export(self, order: int, version: int, life: int) -> PublishedWeights | None:
        """Run the export; its collective work is what the other ranks need in any case.

        Raises:
            InvariantError: this rank yields weights and has nowhere to publish them.
        """
        self._in_order(order)
        buckets = self._trainer.export_weights(version)
        try:
            first = await anext(buckets, None)
            if first is None:
                return None
            if self._weight_sync is None:
                raise InvariantError(
                    "a rank yields weights though it was not said to (sharded_export)"
                )
            return await self._weight_sync.publish(version, life, _resumed(first, buckets))
        finally:
            # Now, not when it is collected: the trainer may have to keep in step with other ranks.
            if isinstance(buckets, AsyncGenerator):
                await buckets.aclose()

    async def coming(self, version: int, life: int) -> PublishedWeights | None:
        """What can be fetched of a version while it is exported."""
        if not isinstance(self._weight_sync, SupportsOverlappedFetch):
            return None
        return await self._weight_sync.coming(version, life)

    async def retire(self, version: int, life: int) -> None:
        """Give a version's memory back."""
        if self._weight_sync is not None:
            await self._weight_sync.retire(version, life)

    async def save(self, order: int, path: str) -> None:
        """Take part in a checkpoint."""
        self._in_order(order)
        await self._trainer.save(path)

    async def load(self, order: int, path: str) -> None:
        """Take part in loading one."""
        self._in_order(order)
        await self._trainer.load(path)

    async def save_model(self, order: int, path: str) -> bool:
        """Take part in writing the model."""
        self._in_order(order)
        if not isinstance(self._trainer, SupportsModelExport):
            return False
        await self._trainer.save_model(path)
        return True

    def _in_order(self, order: int) -> None:
        """Count one call; `InvariantError` if it is not the next one."""
        if order != self._order:
            raise InvariantError(f"this rank expects call {self._order}, got call {order}")
        self._order += 1


def _checked(answer: T, kind: type[T], call: str) -> T:
    """The answer of a plugin's trainer; `EngineError` if it is of another type."""
    if not isinstance(answer, kind):
        raise EngineError(
            f"the trainer's {call} returned {answer!r:.80}; it must return a {kind.__name__} "
            f"({kind.__module__})"
        )
    return answer


async def _resumed(first: Bucket, others: AsyncIterator[Bucket]) -> AsyncIterator[Bucket]:
    yield first
    async for bucket in others:
        yield bucket
