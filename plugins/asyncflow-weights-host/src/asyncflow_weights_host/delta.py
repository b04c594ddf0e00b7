"""Deltas: what changed between two versions, without loss. Pure.

New bytes are taken XOR the base's, element byte by element byte: an update of a few percent leaves
sign, exponent and high mantissa as they were, so whole planes of bytes are zero or nearly so. Each
plane of a block is stored as nothing, as positions or a bitmap with the bytes that differ, or
whole, whichever is shortest. What comes out of `apply` is bit-equal to the new version, or
`DataError`.

    delta of a bucket = for each tensor, for each block of elements, for each byte of an element:
                        kind (1 byte), count (4 bytes), then where (positions of 4 bytes, or a
                        bitmap) and the bytes there
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.errors import DataError
from asyncflow_core.services.weight_sync import DTYPE_BYTES, TensorSpec

__all__ = ["apply", "encode"]

_BLOCK = 1 << 20
"""Elements; a block and what is made of it stay in a cache."""
_PLANE = struct.Struct("<BI")
_SAME, _LISTED, _MAPPED, _WHOLE = range(4)


def encode(
    base: NDArray[np.uint8], new: NDArray[np.uint8], specs: Sequence[TensorSpec]
) -> NDArray[np.uint8]:
    """What turns `base` into `new`, two states of one bucket."""
    parts: list[bytes | NDArray[np.uint8]] = []
    for old_planes, new_planes in zip(_blocks(base, specs), _blocks(new, specs), strict=True):
        changed = np.bitwise_xor(old_planes, new_planes)
        for number in range(changed.shape[1]):
            parts += _plane(np.ascontiguousarray(changed[:, number]))
    return np.frombuffer(b"".join(bytes(part) for part in parts), np.uint8)


def apply(
    base: NDArray[np.uint8], delta: NDArray[np.uint8], specs: Sequence[TensorSpec]
) -> NDArray[np.uint8]:
    """The new state of a bucket.

    Raises:
        DataError: the delta is cut off, too long, or of another bucket.
    """
    new = base.copy()
    reader = _Reader(delta)
    for planes in _blocks(new, specs):
        for number in range(planes.shape[1]):
            reader.add(planes[:, number])
    reader.finish()
    return new


def _blocks(data: NDArray[np.uint8], specs: Sequence[TensorSpec]) -> Iterator[NDArray[np.uint8]]:
    """Views [elements, bytes of one], a block of a tensor at a time."""
    for spec in specs:
        tensor = data[spec.offset : spec.offset + spec.nbytes]
        planes = tensor.reshape(-1, DTYPE_BYTES[spec.dtype])
        for start in range(0, len(planes), _BLOCK):
            yield planes[start : start + _BLOCK]


def _plane(plane: NDArray[np.uint8]) -> list[bytes | NDArray[np.uint8]]:
    mask = plane != 0
    count = int(np.count_nonzero(mask))
    if count == 0:
        return [_PLANE.pack(_SAME, 0)]
    if count > len(plane) * 7 // 8:
        return [_PLANE.pack(_WHOLE, len(plane)), plane]
    if count * 32 < len(plane):
        places = np.flatnonzero(mask)
        return [_PLANE.pack(_LISTED, count), places.astype("<u4"), plane[places]]
    return [_PLANE.pack(_MAPPED, count), np.packbits(mask), plane[mask]]


class _Reader:
    """Takes a delta apart, plane by plane."""

    def __init__(self, delta: NDArray[np.uint8]) -> None:
        self._delta = delta
        self._at = 0

    def add(self, plane: NDArray[np.uint8]) -> None:
        """XOR the next plane of the delta into this one."""
        kind, count = _PLANE.unpack(self._take(_PLANE.size).tobytes())
        if kind == _LISTED and count <= len(plane):
            places = np.frombuffer(self._take(4 * count).tobytes(), "<u4")
            if count and (
                int(places.max()) >= len(plane) or (np.diff(places.view("<i4")) < 1).any()
            ):
                raise DataError("a delta lists a position twice, or outside its plane")
            plane[places] ^= self._take(count)
        elif kind == _MAPPED and count <= len(plane):
            bits = np.unpackbits(self._take(-(-len(plane) // 8)), count=len(plane))
            if int(np.count_nonzero(bits)) != count:
                raise DataError(f"a delta's bitmap does not have the {count} changes it announced")
            changed = np.flatnonzero(bits)
            plane[changed] ^= self._take(count)
        elif kind == _WHOLE and count == len(plane):
            plane ^= self._take(count)
        elif (kind, count) != (_SAME, 0):
            raise DataError(f"a delta has {count} changes of kind {kind} for {len(plane)} elements")

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        taken = self._delta[self._at : self._at + nbytes]
        if len(taken) != nbytes:
            raise DataError(f"a delta of {len(self._delta)} bytes ends before its last plane")
        self._at += nbytes
        return taken

    def finish(self) -> None:
        """`DataError` if something is left over."""
        if self._at != len(self._delta):
            raise DataError(f"a delta has {len(self._delta) - self._at} bytes too many")
