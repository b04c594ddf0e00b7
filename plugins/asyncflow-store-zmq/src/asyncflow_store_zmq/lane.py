"""Calls of clients on this machine, without ZeroMQ: one system call and one wake-up each way.

ZeroMQ hands each message to a thread of its own, on both sides; waking those costs more than all
that a controller does for a row. So the controller also listens at a plain socket, beside the one
of its `ipc://` address, and clients that share its memory call it there. Messages are as on the
wire (header and frames), with their sizes before them:

    parts u32, size u64 of each, parts

A client says [wire version, token, name] and is answered [wire version], or [code, message] and
cut off. Then it sends [number, method, arguments] and gets [number, value] or
[number, code, message], in the order in which calls end. Who is gone is seen at once, by the end
of the stream.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from asyncflow_core.errors import WireDecodeError
from asyncflow_core.wire import Buffer, Limits

__all__ = ["CHUNK", "HELLO_LIMITS", "MAX_PARTS", "Inbox", "framed", "lane_of"]

CHUNK = 1 << 18
"""Most bytes read at a time."""
MAX_PARTS = 500
"""That one system call sends."""
HELLO_LIMITS = Limits(frames=0, total_bytes=4096, header_bytes=4096, depth=2, items=8)
"""Of who has not shown the token."""
_PATH_BYTES = 107  # of a socket's address, with the byte that ends it less
_COUNT = struct.Struct("<I")


def lane_of(address: str) -> Path | None:
    """Where the lane of a controller's address is; None where there is none."""
    if not address.startswith("ipc://"):
        return None
    path = f"{address.removeprefix('ipc://')}.lane"
    return Path(path) if len(path.encode()) <= _PATH_BYTES else None


def framed(parts: Sequence[Buffer]) -> list[Buffer]:
    """A message ready to be sent."""
    sizes = [len(part) for part in parts]
    return [struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes), *parts]


class Inbox:
    """Cuts what comes out of a stream into messages.

    Attributes:
        limits: of a message; checked before any of it is kept.
    """

    def __init__(self, limits: Limits) -> None:
        """Nothing has come."""
        self.limits = limits
        self._chunks: list[bytes] = []
        self._size = 0  # of the chunks
        self._at = 0  # where the next message begins in the first of them
        self._needed = _COUNT.size  # bytes from there on without which there is nothing to do

    def add(self, data: bytes) -> None:
        """Some bytes have come."""
        self._chunks.append(data)
        self._size += len(data)

    def take(self) -> list[Buffer] | None:
        """The next message; None when it is not whole.

        Raises:
            WireDecodeError: it is over a limit.
        """
        if self._size - self._at < self._needed:
            return None
        if len(self._chunks) > 1:
            self._chunks = [b"".join(self._chunks)]
        data, at = self._chunks[0], self._at
        (count,) = _COUNT.unpack_from(data, at)
        if not 1 <= count <= 1 + self.limits.frames:
            raise WireDecodeError(f"a message of {count} parts has no or too many of them")
        start = at + _COUNT.size + 8 * count
        if self._size < start:
            self._needed = start - at
            return None
        sizes = struct.unpack_from(f"<{count}Q", data, at + _COUNT.size)
        if (
            sizes[0] > self.limits.header_bytes
            or max(sizes[1:], default=0) > self.limits.frame_bytes
            or sum(sizes) > self.limits.total_bytes
        ):
            raise WireDecodeError(f"a message of {sum(sizes)} bytes is too large")
        end = start + sum(sizes)
        if self._size < end:
            self._needed = end - at
            return None
        parts: list[Buffer] = [data[start : start + sizes[0]]]
        start += sizes[0]
        view = memoryview(data)
        for size in sizes[1:]:
            parts.append(view[start : start + size])
            start += size
        self._needed, self._at = _COUNT.size, end
        if end == self._size:
            self._chunks.clear()
            self._size = self._at = 0
        return parts
