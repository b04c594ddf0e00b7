"""Values to frames and back: a msgpack header and raw frames.

A message is `[header, frame, ...]`. The header holds plain msgpack; three extension codes (never
re-used for something else) carry what msgpack has not:

- 1 key: `Key.pack()`, 16 bytes, or a `GroupKey`, 14 bytes;
- 2 array inside: dtype code u8, axes u8, sizes u64 each, then the elements;
- 3 array in a frame: the same start, then the number of the frame u32.

Dataclasses are maps of their fields, without those equal to their default; tuples and sets are
lists; enums are their values. Types are put back by the receiver, who knows them (`_typed.py`):
nothing in a message names a type or code to run.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import Batch, Column, GroupKey, Key
from asyncflow_core.errors import DataError, WireDecodeError
from asyncflow_core.wire.limits import Limits

__all__ = ["Buffer", "Encoder", "decode", "encode", "unpack"]

Buffer = bytes | memoryview
"""A frame; both have a length and the buffer protocol."""

# By position: the wire sends the number. Append only. Little-endian, as the machines we run on.
_DTYPES = tuple(
    np.dtype(name)
    for name in ("?", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_DTYPE_NAMES = ", ".join(dtype.name for dtype in _DTYPES)

_EXT_KEY, _EXT_ARRAY, _EXT_FRAME = 1, 2, 3
_GROUP_KEY = struct.Struct("<HIQ")
_FRAME_NUMBER = struct.Struct("<I")
# Below this an array rides in the header, which is cheaper than a frame of its own.
_INLINE_BYTES = 512
_LEAVES = frozenset((type(None), bool, int, float, str, bytes, Key, GroupKey, np.ndarray))
_NESTS = frozenset((list, dict))
_KEYS = frozenset((str, int, Key, GroupKey))
_SMALL_BYTES = 1024
"""A header so short announces few entries: no list of it more than it has bytes."""


class Encoder:
    """Encodes one value at a time; keep one per thread, as its buffers are used again."""

    def __init__(self, limits: Limits | None = None) -> None:
        """Check what is encoded against `limits`."""
        self._limits = limits or Limits()
        self._packer = msgpack.Packer(default=self._default, strict_types=True)
        self._frames: list[Buffer] = []

    def encode(self, value: Any, *, known: bool = False) -> list[Buffer]:
        """Header and frames of a value; frames are views of its arrays, not copies.

        Arrays may not change until the message has left.

        Args:
            value: what to send.
            known: how it nests, and the keys of its maps, are the caller's own choice and allowed;
                so its header is not read again to see whether a receiver would refuse it.

        Raises:
            DataError: something in the value cannot be sent, or the message is over a limit.
        """
        self._frames = []
        try:
            header: bytes = self._packer.pack(value)
        except DataError:
            self._packer.reset()
            raise
        except (ValueError, TypeError, OverflowError, struct.error) as error:
            self._packer.reset()
            raise DataError(f"a value cannot be sent: {error}") from error
        frames, self._frames = self._frames, []
        fault = _over_limit(header, frames, self._limits)
        if fault:
            raise DataError(f"a message is too large to send: {fault}")
        if not known or len(header) > self._limits.items:  # an entry takes a byte at least
            self._check_shape(header)
        return [header, *frames]

    def _check_shape(self, header: bytes) -> None:
        """Depth and sizes, as the receiver will: it cuts off whoever breaks its limits."""
        try:
            _check_tree(_plain(header, _stand_in, self._limits), self._limits.depth)
        except (WireDecodeError, ValueError) as error:
            raise DataError(f"a value cannot be sent, its header would be refused: {error}") from (
                error
            )

    def _default(self, value: Any) -> Any:
        """What msgpack does not know, as something it does."""
        kind = type(value)
        if kind is Key:
            return msgpack.ExtType(_EXT_KEY, value.pack())
        if kind is np.ndarray:
            return self._array(value)
        if kind is tuple:
            return list(value)
        fields = _FIELDS.get(kind) or _fields(kind)
        if fields is not None:
            return fields(value)
        return _other(value)

    def _array(self, array: NDArray[Any]) -> msgpack.ExtType:
        code = _DTYPE_CODES.get(array.dtype)
        if code is None:
            raise DataError(
                f"an array of dtype {array.dtype} cannot be sent; allowed: {_DTYPE_NAMES} "
                "(text and objects go in an object column or a list)"
            )
        if array.ndim > self._limits.array_ndim:
            raise DataError(
                f"an array of {array.ndim} axes cannot be sent, at most {self._limits.array_ndim}"
            )
        # Not ascontiguousarray: that makes an axis for an array that has none.
        array = np.asarray(array, order="C")
        start = struct.pack(f"<BB{array.ndim}Q", code, array.ndim, *array.shape)
        if array.nbytes < _INLINE_BYTES:
            return msgpack.ExtType(_EXT_ARRAY, start + array.tobytes())
        self._frames.append(array.reshape(-1).view(np.uint8).data)
        return msgpack.ExtType(_EXT_FRAME, start + _FRAME_NUMBER.pack(len(self._frames) - 1))


def encode(value: Any, limits: Limits | None = None) -> list[Buffer]:
    """`Encoder.encode` for a single value."""
    return Encoder(limits).encode(value)


def decode(
    frames: Sequence[Buffer], annotation: Any = Any, limits: Limits | None = None, *,
    strict: bool = False,
) -> Any:  # fmt: skip
    """Rebuild a value of a known type.

    Arrays are read-only; large ones are views that keep their frame alive, so take a copy to
    change one, or to keep a few rows of many.

    Args:
        frames: as `encode` made them.
        annotation: type of the value; `Any` gives plain values (a tuple comes as a list).
        limits: bounds of the message.
        strict: refuse dataclass fields unknown here, as for arguments (what was asked cannot be
            done); otherwise they are ignored, as for results (a newer peer reports more).

    Raises:
        WireDecodeError: the frames are malformed or over a limit, or not of that type.
    """
    if not frames:
        raise WireDecodeError("a message has no header")
    tree = unpack(bytes(frames[0]), frames[1:], limits or Limits())
    if annotation is Any:
        return tree
    from asyncflow_core.wire._typed import builder

    return builder(strict=strict).build(annotation, tree)


def unpack(header: bytes, frames: Sequence[Buffer], limits: Limits) -> Any:
    """The plain values of a message: None, bool, int, float, str, bytes, list, dict, keys, arrays.

    Raises:
        WireDecodeError: as `decode`.
    """
    fault = _over_limit(header, frames, limits)
    if fault:
        raise WireDecodeError(f"a message is refused: {fault}")
    used = [False] * len(frames)

    def extension(code: int, data: bytes) -> Any:
        if code == _EXT_KEY:
            return Key.unpack(data) if len(data) != _GROUP_KEY.size else _group_key(data)
        if code not in (_EXT_ARRAY, _EXT_FRAME):
            raise ValueError(f"unknown extension code {code}")
        dtype, shape, start = _array_start(data, limits)
        if code == _EXT_ARRAY:
            return _array(data[start:], dtype, shape)
        if len(data) != start + _FRAME_NUMBER.size:
            raise ValueError("a frame number is truncated")
        (number,) = _FRAME_NUMBER.unpack_from(data, start)
        if number >= len(frames) or used[number]:
            raise ValueError(f"frame {number} of {len(frames)} is not there or used twice")
        used[number] = True
        return _array(frames[number], dtype, shape)

    try:
        _check_entries(header, limits)
        tree = _plain(header, extension, limits)
    except (msgpack.exceptions.UnpackException, ValueError, TypeError, struct.error) as error:
        raise WireDecodeError(f"a header does not decode: {error or type(error).__name__}") from (
            error
        )
    if not all(used):
        raise WireDecodeError(f"frame {used.index(False)} belongs to no array of the header")
    _check_tree(tree, limits.depth)
    return tree


def _check_entries(header: bytes, limits: Limits) -> None:
    """Every announced entry is there: skipping proves it and builds nothing.

    Otherwise nested lists could announce, and make msgpack allocate, more entries than there are
    bytes. In a short header that is too little to matter.
    """
    if len(header) > _SMALL_BYTES:
        scanner = msgpack.Unpacker(None, max_buffer_size=limits.header_bytes)
        scanner.feed(header)
        scanner.skip()


def _stand_in(_code: int, _data: bytes) -> str:
    """For a key or array of our own, when only the shape of a header matters."""
    return ""


def _plain(header: bytes, extension: Callable[[int, bytes], Any], limits: Limits) -> Any:
    most = min(limits.items, len(header))  # an entry takes a byte at least
    return msgpack.unpackb(
        header, ext_hook=extension, strict_map_key=False, max_array_len=most, max_map_len=most
    )


def _over_limit(header: Buffer, frames: Sequence[Buffer], limits: Limits) -> str | None:
    if len(header) > limits.header_bytes:
        return f"its header has {len(header)} bytes, at most {limits.header_bytes} are allowed"
    if not frames:
        return None
    if len(frames) > limits.frames:
        return f"it has {len(frames)} frames, at most {limits.frames} are allowed"
    sizes = [len(frame) for frame in frames]
    if max(sizes) > limits.frame_bytes:
        return f"a frame has {max(sizes)} bytes, at most {limits.frame_bytes} are allowed"
    if sum(sizes) + len(header) > limits.total_bytes:
        return f"it has {sum(sizes)} bytes, at most {limits.total_bytes} are allowed"
    return None


def _check_tree(tree: Any, depth: int) -> None:
    """Level by level: no nesting, however deep, can exhaust the stack."""
    level = [tree]
    for _ in range(depth + 1):
        kinds = set(map(type, level)) - _LEAVES
        if not kinds:
            return
        for kind in kinds - _NESTS:
            raise WireDecodeError(f"a header holds a {kind.__name__}, which is not allowed")
        below: list[Any] = []
        for value in level:
            if type(value) is list:
                below += value
            elif type(value) is dict:
                if not _KEYS.issuperset(map(type, value)):
                    raise WireDecodeError("a map has a key that is no string, integer or row key")
                below += value.values()
        if not below:
            return
        level = below
    raise WireDecodeError(f"a header nests deeper than the {depth} levels allowed")


def _array_start(data: bytes, limits: Limits) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Dtype, shape, and where the rest begins."""
    if len(data) < 2:
        raise ValueError("an array's description is truncated")
    code, ndim = data[0], data[1]
    if code >= len(_DTYPES):
        raise ValueError(f"dtype code {code} is unknown; allowed: {_DTYPE_NAMES}")
    if ndim > limits.array_ndim:
        raise ValueError(f"an array has {ndim} axes, at most {limits.array_ndim} are allowed")
    start = 2 + 8 * ndim
    if len(data) < start:
        raise ValueError("an array's shape is truncated")
    return _DTYPES[code], struct.unpack_from(f"<{ndim}Q", data, 2), start


def _array(data: Buffer, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    size = dtype.itemsize
    for axis in shape:
        size *= axis  # Python integers: an absurd shape cannot overflow into a plausible one
    if size != len(data):
        raise ValueError(f"an array of shape {shape} and dtype {dtype} is not {len(data)} bytes")
    array = np.frombuffer(data, dtype).reshape(shape)
    if not array.flags.aligned:
        array = array.copy()
    array.flags.writeable = False
    return array


def _group_key(data: bytes) -> GroupKey:
    return GroupKey(*_GROUP_KEY.unpack(data))


def _batch_fields(batch: Batch) -> dict[str, Any]:
    return {"rows": batch.rows, "columns": dict(batch)}


def _column_fields(column: Column) -> dict[str, Any]:
    if column.offsets is None:
        return {"values": column.values}
    return {"values": column.values, "offsets": column.offsets}


_FIELDS: dict[type, Callable[[Any], dict[str, Any]]] = {
    Batch: _batch_fields,
    Column: _column_fields,
}


def _fields(kind: type) -> Callable[[Any], dict[str, Any]] | None:
    """How the fields of a dataclass are taken; kept for the next value of the class."""
    if not dataclasses.is_dataclass(kind):
        return None
    fields = [field for field in dataclasses.fields(kind) if field.init]
    names, defaults = [f.name for f in fields], [f.default for f in fields]
    simple = frozenset((bool, int, str))

    def take(value: Any) -> dict[str, Any]:
        found = {}
        for name, default in zip(names, defaults, strict=True):
            entry = getattr(value, name)
            # A default is not sent: so a receiver too old for a field minds only if it is used.
            if entry is default or (
                type(entry) in simple and type(entry) is type(default) and entry == default
            ):
                continue
            found[name] = entry
        return found

    _FIELDS[kind] = take
    return take


def _other(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, GroupKey):
        return msgpack.ExtType(_EXT_KEY, _GROUP_KEY.pack(*value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise DataError(
        f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot be sent; "
        "allowed: None, bool, int, float, str, bytes, lists, maps, plain arrays, Batch, Key and "
        "dataclasses of them"
    )
