"""Splitting rows into micro-batches over ranks. Pure.

Every rank gets equally many micro-batches, so that their collectives match; where rows run out a
rank gets an empty one. Shares are token-balanced: longest rows first, each to the bin with the
fewest tokens so far (greedy longest-processing-time: at most 4/3 of the best balance).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["split"]


def split(tokens: Sequence[int], *, ranks: int, limit_tokens: int) -> list[list[list[int]]]:
    """Assign rows to micro-batches.

    Args:
        tokens: tokens of each row.
        ranks: how many ranks share the rows.
        limit_tokens: most tokens of one micro-batch of one rank; a longer row goes alone.

    Returns:
        [micro-batch][rank] -> row indices, ascending; every row once.
    """
    order = sorted(range(len(tokens)), key=lambda row: (-tokens[row], row))
    total = sum(tokens)
    rounds = max(1, -(-total // (ranks * limit_tokens)))
    while True:
        bins = _fill(order, tokens, rounds * ranks)
        fits = all(
            sum(tokens[row] for row in rows) <= limit_tokens or len(rows) == 1 for rows in bins
        )
        if fits or rounds >= max(1, len(tokens)):
            break
        rounds += 1
    # Pair heavy with heavy: ranks of one round should finish together.
    bins.sort(key=lambda rows: -sum(tokens[row] for row in rows))
    return [
        [sorted(rows) for rows in bins[first : first + ranks]]
        for first in range(0, rounds * ranks, ranks)
    ]


def _fill(order: Sequence[int], tokens: Sequence[int], count: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, index) for index in range(count)]
    for row in order:
        load, index = heapq.heappop(heap)
        bins[index].append(row)
        heapq.heappush(heap, (load + tokens[row], index))
    return bins
