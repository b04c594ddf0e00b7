"""Lists of numbers in a call, as bytes: rows and keys int64, tokens and versions int32.

Little-endian, one after another. An array would say its type and shape in the message, which
both sides know, and costs several times as much to make when it has a few entries.
"""

from __future__ import annotations

import itertools
import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.errors import DataError

__all__ = ["dump_keys", "dump_lengths", "dump_rows", "facts_of", "keys_of", "load_rows"]

_FEW = 8
"""So few rows are counted one by one: numpy's functions cost more."""


def dump_rows(rows: Sequence[int]) -> bytes:
    """Row numbers as bytes."""
    return struct.pack(f"<{len(rows)}q", *rows)


def load_rows(data: bytes) -> tuple[int, ...]:
    """Inverse of `dump_rows`."""
    return struct.unpack(f"<{len(data) // 8}q", data)


def dump_keys(keys: Sequence[tuple[int, ...]], parts: int) -> bytes:
    """Keys, of so many parts each, as bytes.

    Raises:
        DataError: some are no keys.
    """
    flat = itertools.chain.from_iterable(keys)
    try:
        return struct.pack(f"<{parts * len(keys)}q", *flat)
    except struct.error as error:
        raise DataError(
            f"{len(keys)} keys are not {parts} whole numbers of 64 bits each: {error}"
        ) from error


def dump_lengths(offsets: Sequence[Any], rows: int) -> bytes:
    """Values of each row in some ragged columns together, by their offsets, as int32."""
    if rows <= _FEW:
        counts = [0] * rows
        for ends in offsets:
            many = ends.tolist()
            for row in range(rows):
                counts[row] += many[row + 1] - many[row]
        return struct.pack(f"<{rows}i", *counts)
    total = np.zeros(rows, np.int32)
    for ends in offsets:
        total += (ends[1:] - ends[:-1]).astype(np.int32)
    return total.tobytes()


def facts_of(data: bytes) -> array[int]:
    """Tokens or versions of rows as the ledger takes them, int32 [rows]."""
    return array("i", data)


def keys_of(data: bytes, parts: int) -> NDArray[np.int64]:
    """Keys, int64 [keys, parts]."""
    return np.frombuffer(data, np.int64).reshape(-1, parts)
