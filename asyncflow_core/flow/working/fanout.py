"""Making the ranks of an SPMD trainer one service.

Rank 0 receives each call once and repeats it to all ranks in one order; each rank reads its rows
itself, by reference. A rank that fails fails the call on all, by number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from asyncflow_core.batch import Batch, BatchRef
from asyncflow_core.errors import DataError, InvariantError, ServiceError
from asyncflow_core.flow.processes.control import RankControl
from asyncflow_core.flow.working.micro_batches import split
from asyncflow_core.flow.working.rank import TrainerRank
from asyncflow_core.metrics import Means
from asyncflow_core.services.trainer import (
    ForwardBackwardInfo,
    LossSpec,
    UpdateInfo,
)
from asyncflow_core.services.weight_sync import (
    PublishedWeights,
)

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """All ranks as one.

    Concurrency: calls may come from several tasks; each waits for the one before it, so that all
    ranks get them in one order. With `overlaps_export` a single rank's export holds up nothing but
    `optim_step`, `load` and the next export.
    """

    def __init__(
        self,
        first: TrainerRank,
        others: Sequence[RankControl] = (),
        *,
        overlaps_export: bool = False,
    ) -> None:
        """Take rank 0, which lives here, and the others in their order."""
        if overlaps_export and others:
            raise InvariantError("exports of several ranks are collective and overlap nothing")
        self._overlaps_export = overlaps_export
        self._exported = asyncio.Event()
        self._exported.set()
        self._first = first
        self._ranks: tuple[RankControl, ...] = (first, *others)
        self._order = 0
        self._turn = asyncio.Lock()

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self._ranks)

    async def forward(
        self, refs: Sequence[BatchRef], tokens: Sequence[int], columns: Sequence[str]
    ) -> Batch:
        """`Trainer.forward` of rows, shared out over the ranks by their tokens.

        Every rank takes part, those for whom no row is left with none: sharded parameters are
        gathered by all.

        Args:
            refs: the rows, one reference a lease (`Lease.ref`).
            tokens: of each row (`RowInfo.tokens`), in the order of the references.
            columns: what each rank reads of its rows.

        Returns:
            What the trainer's `forward` returns (`logprobs`), a row for each row of `refs`, in
            their order.

        Raises:
            InvariantError: `tokens` are not as many as rows, or a rank returned another number of
                rows than it was given.
            ServiceError: a rank of several failed; a single rank's error comes as it is.
        """
        rows = sum(len(ref.rows) for ref in refs)
        if len(tokens) != rows:
            raise InvariantError(f"forward of {rows} rows was given the tokens of {len(tokens)}")
        limit = max(sum(tokens), 1)  # a trainer splits its share by itself: one round
        (shares,) = split(tokens, ranks=self.world_size, limit_tokens=limit)
        found = await self._all(
            "forward",
            lambda rank, order, number: rank.forward(order, _chosen(refs, shares[number]), columns),
        )
        if [part.rows for part in found] != [len(share) for share in shares]:
            raise InvariantError(
                f"the trainer's ranks returned {[part.rows for part in found]} rows of forward, "
                f"given were {[len(share) for share in shares]}"
            )
        filled = [part for part in found if part.rows] or found[:1]
        places = np.concatenate([np.asarray(share, np.int64) for share in shares])
        return Batch.concat(filled).take(np.argsort(places))

    async def forward_backward(
        self,
        rows: Sequence[Sequence[BatchRef]],
        columns: Sequence[str],
        loss: LossSpec,
        *,
        last: bool,
    ) -> ForwardBackwardInfo:
        """One micro-batch on each rank, `rows[rank]` on rank `rank`; the sums over all."""
        infos = await self._all(
            "forward_backward",
            lambda rank, order, number: rank.forward_backward(
                order, rows[number], columns, loss, last=last
            ),
        )
        means = Means()
        for info in infos:
            means.add(info.metrics)
        return ForwardBackwardInfo(
            loss_sum=sum(info.loss_sum for info in infos),
            weight=sum(info.weight for info in infos),
            tokens=sum(info.tokens for info in infos),
            rows=sum(info.rows for info in infos),
            metrics=means.pairs(),
        )

    async def optim_step(self) -> UpdateInfo:
        """The same update on all ranks."""
        await self._exported.wait()
        infos = await self._all("optim_step", lambda rank, order, _: rank.optim_step(order))
        if len({(info.updates, info.weight) for info in infos}) > 1:
            raise InvariantError(f"the trainer's ranks made different updates: {list(infos)}")
        return infos[0]

    async def zero_grad(self) -> None:
        """Throw collected gradients away on all ranks."""
        await self._all("zero_grad", lambda rank, order, _: rank.zero_grad(order))

    async def save(self, path: str) -> None:
        """A checkpoint by all ranks."""
        await self._all("save", lambda rank, order, _: rank.save(order, path))

    async def load(self, path: str) -> None:
        """Load a checkpoint on all ranks."""
        await self._exported.wait()
        await self._all("load", lambda rank, order, _: rank.load(order, path))

    async def save_model(self, path: str) -> bool:
        """The model, written by all ranks; False if the trainer cannot."""
        return all(await self._all("save_model", lambda rank, n, _: rank.save_model(n, path)))

    async def export(self, version: int, life: int) -> PublishedWeights:
        """Export on all ranks and publish what each yields, as one version.

        Raises:
            DataError: two ranks yield the same tensor, or none yields any.
        """
        if self._overlaps_export:
            found = [await self._export_aside(version, life)]
        else:
            found = await self._all(
                "export_weights", lambda rank, order, _: rank.export(order, version, life)
            )
        parts = {rank: part for rank, part in enumerate(found) if part is not None}
        if not parts:
            raise DataError(f"no rank of the trainer yields a tensor of version {version}")
        return PublishedWeights.merged(parts)

    async def _export_aside(self, version: int, life: int) -> PublishedWeights | None:
        """The only rank's export, beside whatever else but a change of the weights."""
        await self._exported.wait()
        self._exported.clear()
        try:
            async with self._turn:
                order, self._order = self._order, self._order + 1
                exporting = asyncio.create_task(self._ranks[0].export(order, version, life))
                await asyncio.sleep(0)  # it has begun, and counted its turn
            return await exporting
        finally:
            self._exported.set()

    async def coming(self, version: int, life: int) -> PublishedWeights | None:
        """What can be fetched of a version while rank 0, which yields all of it, exports it."""
        return await self._first.coming(version, life)

    async def retire(self, version: int, life: int) -> None:
        """Give a version's memory back on all ranks."""
        await self._together("retire", [partial(r.retire, version, life) for r in self._ranks])

    async def _all(
        self, name: str, call: Callable[[RankControl, int, int], Awaitable[T]]
    ) -> list[T]:
        async with self._turn:
            order, self._order = self._order, self._order + 1
            calls = [partial(call, rank, order, n) for n, rank in enumerate(self._ranks)]
            results: list[T] = await self._together(name, calls)
            return results

    async def _together(self, name: str, calls: Sequence[Callable[[], Awaitable[Any]]]) -> Any:
        """All results; the first failure at once, since the others may wait for the failed rank."""
        tasks = [
            asyncio.create_task(_named(number, name, self.world_size, call))
            for number, call in enumerate(calls)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


def _chosen(refs: Sequence[BatchRef], indices: Sequence[int]) -> list[BatchRef]:
    """Of the rows of all references, numbered through, those at ascending `indices`."""
    chosen: list[BatchRef] = []
    first = 0
    for ref in refs:
        end = first + len(ref.rows)
        rows = tuple(ref.rows[index - first] for index in indices if first <= index < end)
        if rows:
            chosen.append(replace(ref, rows=rows))
        first = end
    return chosen


async def _named(number: int, name: str, world_size: int, call: Callable[[], Awaitable[T]]) -> T:
    try:
        return await call()
    except Exception as error:
        if world_size == 1:
            raise
        raise ServiceError(
            f"trainer rank {number} of {world_size} failed in {name}: {error}",
            service=f"trainer-{number}",
        ) from error
