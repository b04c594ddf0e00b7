"""What one message may cost; checked before anything of it is decoded or kept."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one message, the same for sender and receiver.

    A sender over a limit gets a `DataError` and nothing is sent; a receiver raises
    `WireDecodeError`.

    Attributes:
        frame_bytes: one frame. libzmq closes the connection of a peer that sends a larger one.
        frames: raw frames beside the header.
        total_bytes: header and frames together. libzmq assembles a message before we see it, so
            this bounds what is decoded and kept, not what a hostile peer can make libzmq hold.
        header_bytes: the msgpack header, with all small values.
        depth: containers inside one another.
        items: entries of one list or map.
        array_ndim: axes of an array.
    """

    frame_bytes: int = 1 << 30
    frames: int = 4096
    total_bytes: int = 1 << 31
    header_bytes: int = 16 << 20
    depth: int = 32
    items: int = 1_000_000
    array_ndim: int = 8
