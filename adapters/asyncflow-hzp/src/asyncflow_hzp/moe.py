"""Expert parallelism: each of neighbouring ranks holds some experts, tokens travel to them.

Experts of one part have copies on every `size`-th rank only. They form a family of parameters with
groups, sizes and communicators of its own; `hzp.shard` treats it like the dense one. Tokens travel
on the computing thread, over a process group of their own.

Shapes: T tokens here, K experts a token, H hidden size, E experts, P = T * K pairs of token and
expert, R pairs received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn

from asyncflow_core.errors import ConfigError
from asyncflow_hzp.links import world
from asyncflow_hzp.units import expert_parallel

__all__ = ["ExpertParallel"]


class _Experts(nn.ModuleDict):
    """The experts here, as one unit."""

    def forward(self, stretches: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Each expert on its stretch."""
        return [self[number](stretch) for number, stretch in stretches.items()]


class ExpertParallel(nn.Module):
    """E experts over `size` neighbouring ranks, E / size on each; with size 1 all are here.

    An expert keeps its number among all in its name, so that checkpoints do not depend on `size`.

    Args:
        experts: all of them, in order; the others' are dropped. Each maps [n, H] to [n, H], also
            for n = 0, so that every rank's backward reaches every parameter.
        size: ranks to spread them over; must divide their number and the number of ranks.
    """

    def __init__(self, experts: Sequence[nn.Module], *, size: int = 1) -> None:
        super().__init__()
        rank, ranks = world()
        if len(experts) % size or ranks % size:
            raise ConfigError(f"{size} ranks do not divide {len(experts)} experts, {ranks} ranks")
        self._total, self._size = len(experts), size
        self._each = len(experts) // size
        first = rank % size * self._each
        self.experts = _Experts(
            {str(number): experts[number] for number in range(first, first + self._each)}
        )
        self._group: Any = None
        if size > 1:
            expert_parallel(self.experts, size)
            for start in range(0, ranks, size):
                group = distributed.new_group(list(range(start, start + size)))
                if start <= rank < start + size:
                    self._group = group

    def forward(
        self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of each token's experts.

        Shapes: tokens [T, H]; chosen int64 [T, K], numbers among E; weights [T, K]; result [T, H].
        """
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        pairs = tokens.index_select(0, order // chosen.shape[1])
        counts = torch.bincount(flat, minlength=self._total)
        results = self._compute(pairs, counts)
        back = torch.argsort(order)
        by_token = results.index_select(0, back).view(*chosen.shape, -1)
        return (by_token * weights.unsqueeze(-1)).sum(1)

    def _compute(self, pairs: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Results of pairs [P, H], which are in the order of their experts; counts [E]."""
        if self._group is None:
            return self._here(pairs, counts.tolist())
        by_rank = counts.view(self._size, self._each)
        received = torch.empty_like(by_rank)
        distributed.all_to_all_single(received, by_rank.contiguous(), group=self._group)
        sends, receives = by_rank.sum(1).tolist(), received.sum(1).tolist()
        arrived = _swap(pairs, sends, receives, self._group)
        # Sorted by sender, then expert; wanted by expert.
        kinds = torch.arange(self._each, device=pairs.device).repeat(self._size)
        expert = torch.repeat_interleave(kinds, received.reshape(-1))
        order = torch.argsort(expert, stable=True)
        results = self._here(arrived.index_select(0, order), received.sum(0).tolist())
        back = torch.argsort(order)
        return _swap(results.index_select(0, back), receives, sends, self._group)

    def _here(self, pairs: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Each expert here on its stretch of the pairs, [R, H]."""
        stretches = torch.split(pairs, list(counts))
        # Called through the container, whose forward gathers the parameters.
        results: list[torch.Tensor] = self.experts(dict(zip(self.experts, stretches, strict=True)))
        return torch.cat(results)


class _Swap(torch.autograd.Function):
    """Rows to the ranks of a group; gradients take the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sends: list[int], receives: list[int], group: Any
    ) -> torch.Tensor:
        ctx.way = receives, sends, group
        return _all_to_all(rows, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sends, receives, group = ctx.way
        return _all_to_all(grads[0], sends, receives, group), None, None, None


def _all_to_all(
    rows: torch.Tensor, sends: list[int], receives: list[int], group: Any
) -> torch.Tensor:
    result = rows.new_empty((sum(receives), *rows.shape[1:]))
    distributed.all_to_all_single(result, rows.contiguous(), receives, sends, group=group)
    return result


def _swap(rows: torch.Tensor, sends: list[int], receives: list[int], group: Any) -> torch.Tensor:
    apply: Any = _Swap.apply  # torch leaves it untyped
    result: torch.Tensor = apply(rows, sends, receives, group)
    return result
