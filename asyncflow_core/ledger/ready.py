"""The ready queue of one task: blocks with rows to hand out, in the task's order."""

from __future__ import annotations

import heapq
from collections import OrderedDict

from asyncflow_core.ledger.blocks import Block
from asyncflow_core.services.data_store import Order

__all__ = ["ReadyQueue"]

# An OrderedDict, for a linked list with an index: O(1) at both ends and for removal in the middle.
# (A plain dict finds its first entry only by passing all that were removed before it.)
_Bucket = OrderedDict[int, Block]


class _Closed:
    """Blocks of a batch that is not handed out yet, and how many whole groups wait in them."""

    __slots__ = ("blocks", "groups")

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[Block, int]] = {}
        self.groups = 0

    def add(self, block: Block, groups: int) -> None:
        """It waits, or waits with other groups."""
        self.groups += groups - self.blocks.get(block.number, (block, 0))[1]
        self.blocks[block.number] = block, groups

    def discard(self, block: Block) -> None:
        """It waits no more, if it did."""
        self.groups -= self.blocks.pop(block.number, (block, 0))[1]


class ReadyQueue:
    """Blocks, each at most once; every operation costs O(1), O(log batches) for ADMITTED.

    `ANY` tasks have a single bucket, the others one a batch. For `ADMITTED`, a heap holds exactly
    the batches that have a bucket: an emptied bucket stays until it reaches the top, so a batch is
    never twice in the heap and is passed over once in its life.

    With `batch_groups`, groups of a batch stay out of the buckets until that many of them wait
    together, or until one was handed out before (told by `open`: in the life before a restart).
    """

    __slots__ = (
        "_batch_groups", "_batches", "_buckets", "_closed", "_heap", "_max_staleness", "_opened",
        "_order",
    )  # fmt: skip

    def __init__(self, order: Order, max_staleness: int, batch_groups: int = 0) -> None:
        """An empty queue."""
        self._batch_groups = batch_groups
        self._closed: dict[int, _Closed] = {}
        self._opened: set[int] = set()
        self._order = order
        self._max_staleness = max_staleness
        self._buckets: dict[int | None, _Bucket] = {None: OrderedDict()}
        self._heap: list[int] = []
        self._batches = order is not Order.ANY

    def push(self, block: Block, *, groups: int = 0, front: bool = False) -> None:
        """Add a block at the end of its batch (or keep its place); `front` puts it first.

        With `batch_groups` there are `groups` whole groups in it.
        """
        batch = block.batch
        if self._batch_groups and batch is not None and batch not in self._opened:
            closed = self._closed.setdefault(batch, _Closed())
            closed.add(block, groups)
            if closed.groups >= self._batch_groups:
                self.open(batch)
            return
        bucket = self._bucket(block)
        bucket[block.number] = block
        if front:
            bucket.move_to_end(block.number, last=False)

    def open(self, batch: int | None) -> None:
        """From now on groups of this batch are handed out."""
        if batch is not None and batch not in self._opened:
            self._opened.add(batch)
            closed = self._closed.pop(batch, _Closed())
            for _, (block, _) in sorted(
                closed.blocks.items()
            ):  # as they were put, not as they came
                self.push(block)

    def opened(self) -> list[int]:
        """Batches that `open` was told of, or that opened themselves."""
        return sorted(self._opened)

    def discard(self, block: Block) -> None:
        """Take a block out, if it is there."""
        if self._closed and block.batch in self._closed:
            self._closed[block.batch].discard(block)
            return
        batch = block.batch if self._batches else None
        bucket = self._buckets.get(batch)
        if bucket is None:
            return
        bucket.pop(block.number, None)
        if not bucket and batch is not None and self._order is Order.STEP:
            del self._buckets[batch]

    def first(self, version: int | None) -> Block | None:
        """The next block that may be handed out at `version`; it stays until it is discarded."""
        bucket = self._first(version)
        return next(iter(bucket.values())) if bucket else None

    def _bucket(self, block: Block) -> _Bucket:
        batch = block.batch if self._batches else None
        bucket = self._buckets.get(batch)
        if bucket is None:
            bucket = self._buckets[batch] = OrderedDict()
            if batch is not None and self._order is Order.ADMITTED:
                heapq.heappush(self._heap, batch)
        return bucket

    def _first(self, version: int | None) -> _Bucket | None:
        """The bucket to take from; empty or None when there is nothing to hand out."""
        if self._order is Order.STEP:
            return self._buckets.get(version)
        if self._buckets[None]:  # few, for who puts them bounds them; last they might never come
            return self._buckets[None]
        while self._heap and not self._buckets[self._heap[0]]:
            del self._buckets[heapq.heappop(self._heap)]
        if self._heap and version is not None and version >= self._heap[0] - self._max_staleness:
            return self._buckets[self._heap[0]]
        return self._buckets[None]
