"""A shard's process: it owns an arena, and serves clients that do not share its memory.

It copies bytes in and out at the places it is told and never looks at what they mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncflow_core.errors import DataError, WireDecodeError
from asyncflow_core.wire import Method, Server
from asyncflow_store_zmq.arena import ARENA_BYTES, UNIT, Arena
from asyncflow_store_zmq.layout import Layout, Piece, join
from asyncflow_store_zmq.spec import StoreSpec

__all__ = ["Shard", "message"]


def message(plain: dict[str, Any]) -> dict[str, Any]:
    """The arguments of every call here: one list, `m`."""
    if plain.keys() != {"m"} or type(plain["m"]) is not list:
        raise WireDecodeError("a call to a store takes one list, 'm'")
    return plain


class Shard:
    """Answers `shard.*`."""

    def __init__(self, spec: StoreSpec, number: int) -> None:
        """Map the arena, which is made if it is not there."""
        self._arena = Arena(spec.arena(number), create=True)
        self._name = f"shard-{number}"

    def expose(self, server: Server) -> None:
        """Offer the methods."""
        methods = {
            "write": self.write,
            "take": self.take,
            "sync": self.sync,
            "allocated": self.allocated,
        }
        server.expose(
            "shard",
            {name: Method(function, message, inline=True) for name, function in methods.items()},
            interface="Shard",
            api_version=1,
        )

    def write(self, m: list[Any]) -> None:
        """Copy frames in: [start, frame], ..."""
        for start, frame in m:
            data = np.asarray(frame).reshape(-1).view(np.uint8)
            _check(start, data.nbytes)
            self._arena.reserve(start, data.nbytes)
            self._arena.data[start : start + data.nbytes] = data

    def take(self, m: list[Any]) -> list[Any] | None:
        """[runs, names]: columns cut out of segments; None where the memory was given away.

        A run is [slot, generation, start, nbytes, layout, rows, first, last, repeat].
        """
        runs, names = m
        pieces = []
        for _, _, start, nbytes, layout, *rows in runs:
            _check(start, nbytes)
            data = self._arena.data[start : start + nbytes]
            pieces.append(Piece(data, Layout.load(layout), *rows))
        try:
            found = [list(join(pieces, name)) for name in names]
        except DataError:
            if self._holds(runs):
                raise
            return None
        return found if self._holds(runs) else None

    def _holds(self, runs: list[Any]) -> bool:
        return all(
            self._arena.holds(start, slot, generation) for slot, generation, start, *_ in runs
        )

    def sync(self, m: list[Any]) -> None:
        """Everything on the disk."""
        self._arena.sync()

    def allocated(self, m: list[Any]) -> int:
        """Bytes of memory or disk taken."""
        return self._arena.allocated()


def _check(start: int, nbytes: int) -> None:
    if not UNIT <= start <= start + nbytes <= ARENA_BYTES:
        raise WireDecodeError(f"{nbytes} bytes at {start} lie outside the memory of a shard")
