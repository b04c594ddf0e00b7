"""Several ranks of a trainer as one `Trainer`, so that `TrainerTests` holds them to its clauses.

The calls go through core's own fan-out, and rows through a store, as in a run. A rank may be an
object here, or live in a process of its own that called `serve_rank`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TypeVar

from asyncflow_core.batch import Batch, BatchRef, GroupKey
from asyncflow_core.errors import AsyncFlowError, ServiceClosedError, ServiceError
from asyncflow_core.flow.working.fanout import Ranks
from asyncflow_core.flow.working.micro_batches import split
from asyncflow_core.flow.working.rank import TrainerRank
from asyncflow_core.reference.data_store import InProcessDataStore
from asyncflow_core.services.data_store import Lease, TaskSpec
from asyncflow_core.services.trainer import (
    ForwardBackwardInfo,
    LossSpec,
    Trainer,
    TrainerStats,
    UpdateInfo,
)
from asyncflow_core.services.weight_sync import Bucket
from asyncflow_core.wire import Client, Server, remote, serve_object, serve_service

__all__ = ["RankLife", "RankedTrainer", "connect_rank", "serve_rank"]

T = TypeVar("T")

_TOKEN = "ranks"  # noqa: S105 - of a socket in a directory of the test's own


class RankLife:
    """Opens and closes the trainer of one process, again and again."""

    def __init__(self, trainer: Trainer) -> None:
        """Take one that was not opened."""
        self._trainer = trainer

    async def begin(self) -> None:
        """Open it."""
        await self._trainer.open()

    async def end(self) -> None:
        """Close it."""
        await self._trainer.aclose()


async def serve_rank(trainer: Trainer, address: str) -> None:
    """Serve one rank, not opened yet, until standard input ends.

    Args:
        trainer: of this rank.
        address: ipc://PATH in a directory of mode 0700.
    """
    server = Server(address, name="rank", token=_TOKEN)
    serve_service(server, "trainer", trainer, Trainer)
    serve_object(server, "life", RankLife(trainer))
    async with server:
        await asyncio.to_thread(sys.stdin.read)
    await trainer.aclose()


async def connect_rank(address: str) -> tuple[Client, Trainer, RankLife]:
    """A rank that was served at `address`; the caller closes the client."""
    client = Client(address, name="test", token=_TOKEN, timeout_s=120, connect_s=120)
    await client.open()
    return client, remote(Trainer, client, "trainer"), remote(RankLife, client, "life")


class RankedTrainer(Trainer):
    """All ranks of a trainer, in their order, as one.

    A rank's error comes as it is, without its number: the kit asks for the kind of it.
    """

    def __init__(self, ranks: Sequence[Trainer], lives: Sequence[RankLife] = ()) -> None:
        """Take ranks that are not open, and the lives of those in other processes."""
        self._ranks, self._lives = ranks, lives
        self._store = InProcessDataStore()
        self._all: Ranks | None = None
        self._puts = 0

    async def open(self) -> None:
        """Open all ranks."""
        await self._store.open()
        await asyncio.gather(*(life.begin() for life in self._lives))
        await asyncio.gather(*(rank.open() for rank in self._ranks))
        first, *others = (TrainerRank(rank, self._store) for rank in self._ranks)
        self._all = Ranks(first, others)

    async def aclose(self) -> None:
        """Close all ranks."""
        self._all = None
        await asyncio.gather(*(rank.aclose() for rank in self._ranks))
        await asyncio.gather(*(life.end() for life in self._lives))
        await self._store.aclose()

    def _opened(self) -> Ranks:
        if self._all is None:
            raise ServiceClosedError("the ranks are not open", service="trainer")
        return self._all

    async def _stored(self, batch: Batch) -> Lease | None:
        """The rows in the store, leased; None without rows."""
        if not batch.rows:
            return None
        self._puts += 1
        name = f"batch-{self._puts}"
        await self._store.register(TaskSpec(name, tuple(batch), partitions=(name,)))
        keys = [GroupKey(0, self._puts, row) for row in range(batch.rows)]
        await self._store.put(batch, keys=keys, partition=name)
        return await self._store.lease(name, requester="test", limit_rows=batch.rows)

    async def forward(self, batch: Batch) -> Batch:
        """Share the rows out, bring their columns back."""
        ranks, lease = self._opened(), await self._stored(batch)
        refs = [] if lease is None else [lease.ref()]
        tokens = [] if lease is None else [info.tokens for info in lease.rows]
        return await _plain(ranks.forward(refs, tokens, tuple(batch)))

    async def forward_backward(
        self, batch: Batch, loss: LossSpec | str, *, last: bool
    ) -> ForwardBackwardInfo:
        """One micro-batch on each rank."""
        ranks, lease = self._opened(), await self._stored(batch)
        rows: list[list[BatchRef]] = [[] for _ in self._ranks]
        if lease is not None:
            tokens = [info.tokens for info in lease.rows]
            (shares,) = split(tokens, ranks=len(rows), limit_tokens=sum(tokens))
            rows = [[lease.ref([lease.rows[row] for row in share])] for share in shares if share]
            rows += [[] for _ in range(len(self._ranks) - len(rows))]
        spec = LossSpec.of(loss)
        return await _plain(ranks.forward_backward(rows, tuple(batch), spec, last=last))

    async def optim_step(self) -> UpdateInfo:
        """The same update on all."""
        return await _plain(self._opened().optim_step())

    async def zero_grad(self) -> None:
        """On all."""
        await _plain(self._opened().zero_grad())

    async def export_weights(self, version: int) -> AsyncIterator[Bucket]:
        """What each rank yields, one rank after another; all of them export at once."""
        self._opened()

        async def exported(rank: Trainer) -> list[Bucket]:
            buckets = rank.export_weights(version)
            return [Bucket(b.specs, b.data.copy()) async for b in buckets]

        for found in await asyncio.gather(*map(exported, self._ranks)):
            for bucket in found:
                yield bucket

    async def save(self, path: str) -> None:
        """By all."""
        await _plain(self._opened().save(path))

    async def load(self, path: str) -> None:
        """By all."""
        await _plain(self._opened().load(path))

    async def stats(self) -> TrainerStats:
        """Tokens and time of all, updates of the first."""
        self._opened()
        found = [await rank.stats() for rank in self._ranks]
        tokens, busy_s = sum(one.tokens for one in found), sum(one.busy_s for one in found)
        return TrainerStats(found[0].updates, tokens, busy_s)


async def _plain(call: Awaitable[T]) -> T:
    """The result, or the rank's own error in the place of the one that names the rank."""
    try:
        return await call
    except ServiceError as error:
        if isinstance(error.__cause__, AsyncFlowError):
            raise error.__cause__ from None
        raise
