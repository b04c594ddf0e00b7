"""Splitting rows over data-parallel ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow_core.services.data_store import RowInfo

__all__ = ["balanced_shares"]


def balanced_shares(rows: Sequence[RowInfo], ranks: int) -> list[tuple[RowInfo, ...]]:
    """Token-balanced shares, one a rank; a rank reads its own by `lease.ref(share)`.

    The longest row left goes to the rank with the fewest tokens (then the fewest rows). Order
    within a share is that of `rows`.
    """
    order = {info.row: position for position, info in enumerate(rows)}
    shares: list[list[RowInfo]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for info in sorted(rows, key=lambda info: -info.tokens):
        rank = min(range(ranks), key=lambda r: (tokens[r], len(shares[r])))
        shares[rank].append(info)
        tokens[rank] += info.tokens
    return [tuple(sorted(share, key=lambda info: order[info.row])) for share in shares]
