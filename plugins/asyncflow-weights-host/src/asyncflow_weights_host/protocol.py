"""Messages between publisher and replicas: a fixed header, and a frame of bytes where there is one.

JOIN  who pulls a version, to its publisher      -> PARENT  from whom to take it
GET   a chunk, to a parent                       -> CHUNK   its bytes, once they are there
LOST  a parent that fell silent, to the publisher -> PARENT  another
HAS   is a version there, to its publisher       -> PARENT
GONE  instead of any answer: there is none
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

__all__ = ["TOKEN_BYTES", "Content", "Header", "Op"]

TOKEN_BYTES = 16
_HEADER = struct.Struct(f"<B{TOKEN_BYTES}sqqBI")


class Op(IntEnum):
    """What a message says."""

    JOIN = 1
    GET = 2
    LOST = 3
    PARENT = 4
    CHUNK = 5
    GONE = 6
    HAS = 7


class Content(NamedTuple):
    """What is moved: a version of a life, or the delta to it from the version before.

    `origin` is the secret of its publisher: whoever has a locator of it has that.
    """

    origin: bytes
    version: int
    life: int
    is_delta: bool


@dataclass(frozen=True, slots=True)
class Header:
    """The first frame.

    Attributes:
        op: what it says.
        content: what it is about; shows the publisher's secret.
        chunk: number of a chunk, else 0.
    """

    op: Op
    content: Content
    chunk: int = 0

    def pack(self) -> bytes:
        """As bytes."""
        return _HEADER.pack(self.op, *self.content, self.chunk)

    @classmethod
    def unpack(cls, raw: bytes) -> Header | None:
        """From bytes; None if it is none."""
        if len(raw) != _HEADER.size:
            return None
        op, origin, version, life, is_delta, chunk = _HEADER.unpack(raw)
        if op not in Op._value2member_map_ or is_delta > 1:
            return None
        return cls(Op(op), Content(origin, version, life, bool(is_delta)), chunk)
