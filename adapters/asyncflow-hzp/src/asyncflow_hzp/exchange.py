"""Collectives made of sends: each rank sends what it must and no more.

gloo's reduce-scatter is an all-reduce, which at two ranks sends twice the ideal. Sent pairwise, a
gather and a reduce-scatter over z ranks of n elements each send n (z-1)/z. Where the ranks stand on
several nodes, equally many on each, a piece crosses between two nodes once: a gather goes first to
the rank of the same position on the other nodes, then to the neighbours; a reduce-scatter the other
way, summing on the node first. Sums are taken in rank order whoever takes them, so that every rank
computes the same bits. NCCL's own collectives are ideal already; where shards lie in rank order
they are used instead.

Concurrency: an `Exchange` belongs to one thread, and all ranks call it in one order.

Shapes: `buffer` [n], a flat tensor; pieces are stretches of it.
Units: traffic is counted in bytes sent by this rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed

from asyncflow_hzp.layout import Piece

__all__ = ["Exchange", "even_pieces"]


def even_pieces(ranks: Sequence[int], elements: int) -> tuple[Piece, ...]:
    """Cut a tensor into one stretch a rank; the first ones take the remainder."""
    size, left = divmod(elements, len(ranks))
    pieces, start = [], 0
    for number, rank in enumerate(ranks):
        stop = start + size + (number < left)
        pieces.append(Piece(rank, start, stop))
        start = stop
    return tuple(pieces)


class Exchange:
    """Gathers and reductions over any subset of the ranks of one process group.

    Args:
        rank: this rank.
        group: a process group of all ranks, used by this exchange alone.
        node_of: the node a rank stands on.
        scratch: gives room for what arrives before it is added up.
    """

    def __init__(
        self,
        rank: int,
        group: Any,
        node_of: Callable[[int], int],
        scratch: Callable[[torch.dtype, int], torch.Tensor],
    ) -> None:
        self.rank = rank
        self.sent: Counter[str] = Counter()
        self._group = group
        self._node_of = node_of
        self._scratch = scratch
        self._native: dict[tuple[int, ...], Any] = {}

    def link(self, other: int) -> str:
        """The class of the link to another rank: "intra" or "inter" node."""
        return "intra" if self._node_of(other) == self._node_of(self.rank) else "inter"

    def use_native(self, ranks: Sequence[int], group: Any) -> None:
        """Let the backend's own collectives of `group` serve pieces of these ranks in order."""
        self._native[tuple(ranks)] = group

    def release(self) -> None:
        """Forget the groups: what refers to one keeps its connections open, and others waiting."""
        self._group, self._native = None, {}

    def gather(self, buffer: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Fill the others' pieces; this rank's is there already."""
        mine = self._mine(pieces)
        own = buffer[mine.start : mine.stop]
        native = self._native_group(buffer, pieces)
        if native is not None:
            self._count(pieces, own)
            distributed.all_gather_into_tensor(buffer, own, group=native)
            return
        here, column = self._place(pieces)
        others = [piece for piece in column if piece.rank != self.rank]
        self._swap(
            [(piece.rank, own) for piece in others],
            [(piece.rank, _cut(buffer, piece)) for piece in others],
        )
        self._swap(
            [(rank, _cut(buffer, piece)) for rank in here for piece in column],
            [(rank, _cut(buffer, piece)) for rank, theirs in here.items() for piece in theirs],
        )

    def reduce_scatter(
        self, buffer: torch.Tensor, pieces: Sequence[Piece], out: torch.Tensor
    ) -> None:
        """Sum everybody's stretch of this rank's piece into `out`, which may lie in `buffer`."""
        mine = self._mine(pieces)
        own = buffer[mine.start : mine.stop]
        if len(pieces) == 1:
            if out.data_ptr() != own.data_ptr():
                out.copy_(own)
            return
        native = self._native_group(buffer, pieces)
        if native is not None and out.dtype == buffer.dtype:
            self._count(pieces, own)
            distributed.reduce_scatter_tensor(out, buffer, group=native)
            return
        here, column = self._place(pieces)
        # Neighbours first: this rank sums what its node has for its position on every node.
        arrived = self._receive(
            [(rank, _cut(buffer, piece)) for rank, theirs in here.items() for piece in theirs],
            [(rank, _cut(buffer, piece)) for rank in here for piece in column],
        )
        for number, piece in enumerate(column if len(here) > 1 else ()):
            terms = arrived[number :: len(column)]
            _sum(terms, out if len(column) == 1 else _cut(buffer, piece))
        if len(column) == 1:
            return
        far = [(piece.rank, _cut(buffer, piece)) for piece in column]
        _sum(self._receive(far, [(piece.rank, own) for piece in column]), out)

    def _place(self, pieces: Sequence[Piece]) -> tuple[dict[int, list[Piece]], list[Piece]]:
        """The ranks on a grid of nodes and positions, as this rank sees it.

        Returns:
            Of every rank of this node its column: the pieces of its position on all nodes, in rank
            order; and this rank's own column. Ranks that stand unevenly count as a node each.
        """
        nodes: dict[int, list[Piece]] = {}
        for piece in pieces:
            nodes.setdefault(self._node_of(piece.rank), []).append(piece)
        rows = list(nodes.values())
        if len({len(row) for row in rows}) > 1:
            rows = [[piece] for piece in pieces]
        mine = next(row for row in rows if any(piece.rank == self.rank for piece in row))
        here = {
            piece.rank: list(column)
            for piece, column in zip(mine, zip(*rows, strict=True), strict=True)
        }
        return here, here[self.rank]

    def _receive(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        like: Sequence[tuple[int, torch.Tensor]],
    ) -> list[torch.Tensor]:
        """Swap; what arrives lies in scratch memory, this rank's own part where it was."""
        room = self._scratch(
            like[0][1].dtype, sum(t.numel() for rank, t in like if rank != self.rank)
        )
        terms, start = [], 0
        for rank, tensor in like:
            if rank == self.rank:
                terms.append(tensor)
                continue
            terms.append(room[start : start + tensor.numel()])
            start += tensor.numel()
        self._swap(sends, [(rank, term) for (rank, _), term in zip(like, terms, strict=True)])
        return terms

    def all_reduce(self, buffer: torch.Tensor, ranks: Sequence[int]) -> None:
        """Sum over ranks, in place."""
        if len(ranks) == 1:
            return
        pieces = even_pieces(ranks, buffer.numel())
        mine = self._mine(pieces)
        self.reduce_scatter(buffer, pieces, buffer[mine.start : mine.stop])
        self.gather(buffer, pieces)

    def _mine(self, pieces: Sequence[Piece]) -> Piece:
        return next(piece for piece in pieces if piece.rank == self.rank)

    def _native_group(self, buffer: torch.Tensor, pieces: Sequence[Piece]) -> Any:
        group = self._native.get(tuple(piece.rank for piece in pieces))
        if group is None:
            return None
        step, rest = divmod(buffer.numel(), len(pieces))
        ordered = all(p.start == n * step and not rest for n, p in enumerate(pieces))
        return group if ordered else None

    def _count(self, pieces: Sequence[Piece], own: torch.Tensor) -> None:
        for piece in pieces:
            if piece.rank != self.rank:
                self.sent[self.link(piece.rank)] += own.nbytes

    def _swap(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """Everything at once; empty tensors and this rank are left out."""
        operations = [
            distributed.P2POp(distributed.irecv, tensor, rank, self._group)
            for rank, tensor in receives
            if rank != self.rank and tensor.numel()
        ]
        for rank, tensor in sends:
            if rank != self.rank and tensor.numel():
                operations.append(distributed.P2POp(distributed.isend, tensor, rank, self._group))
                self.sent[self.link(rank)] += tensor.nbytes
        if operations:
            for work in distributed.batch_isend_irecv(operations):
                work.wait()


def _cut(buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
    return buffer[piece.start : piece.stop]


def _sum(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Add up in the given order; `out` may be any of the terms, whose memory is used up."""
    *before, last = terms
    total = before[0]
    if out.dtype != total.dtype:
        total, before = out.copy_(total), [out, *before[1:]]
    for term in before[1:]:
        total.add_(term)
    torch.add(total, last, out=out)
