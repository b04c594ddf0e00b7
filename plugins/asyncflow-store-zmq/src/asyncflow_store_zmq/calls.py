"""The form of every call to a controller, checked before the table sees any of it. Pure.

The table may then rely on types, on numbers that fit where they are kept, and on lengths that
agree; a call of another form changes nothing and is its sender's fault. What numbers mean (a limit
above 0, a lease that lives) is the ledger's to say. Lists of numbers are bytes, see `packed.py`.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import gt
from typing import Any

import numpy as np

from asyncflow_core.batch import Key
from asyncflow_core.errors import DataError, WireDecodeError
from asyncflow_core.services.data_store import Order
from asyncflow_store_zmq.places import MAX_ENTRIES

__all__ = ["MAX_DROPS", "check_call"]

Form = Callable[[Any], bool]

_LIMIT = 1 << 62
_MAX_TEXT = 1024
_MAX_NAMES = 4096
_MAX_LAYOUT = 1 << 20
MAX_TOKENS = 1 << 24
"""Of a row, brought by one call; a row's tokens are kept in 32 bits."""
_MAX_VERSION = (1 << 31) - 1
MAX_DROPS = 4096
"""Dropped groups that one answer of `stats` tells; a client asks for those after them."""
_ORDERS = frozenset(order.value for order in Order)
# Source, epoch, sequence and sample of a key, as `Key.pack` holds them; a sequence as int64 does.
_KEYS_OF = {"put": (1, 3), "drop": (0, 4)}  # by method, position and parts
_KEY_LIMITS = (0xFFFF, 0xFFFFFFFF, _LIMIT, 0xFFFF)
_FEW = 64
"""So few bytes of numbers are looked at one by one: a numpy call costs more."""


def _whole(value: Any) -> bool:
    return type(value) is int and -_LIMIT <= value <= _LIMIT


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LIMIT


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _text(value: Any) -> bool:
    return type(value) is str and len(value) <= _MAX_TEXT


def _flag(value: Any) -> bool:
    return type(value) is bool


def _anything(value: Any) -> bool:
    return True


def _order(value: Any) -> bool:
    return type(value) is str and value in _ORDERS


def _optional(form: Form) -> Form:
    return lambda value: value is None or form(value)


def _names(value: Any) -> bool:
    return type(value) is list and len(value) <= _MAX_NAMES and all(map(_text, value))


def _numbers(value: Any) -> bool:
    return type(value) is list and len(value) <= MAX_ENTRIES and all(map(_count, value))


def _rows(value: Any) -> bool:
    return type(value) is bytes and not len(value) % 8 and len(value) <= 8 * MAX_ENTRIES


def _within(value: Any, low: int, high: int) -> bool:
    if type(value) is not bytes or len(value) % 4 or len(value) > 4 * MAX_ENTRIES:
        return False
    if len(value) > _FEW:
        many = np.frombuffer(value, np.int32)
        return bool(low <= many.min() and many.max() <= high)
    numbers = array("i", value)
    return not numbers or (low <= min(numbers) and max(numbers) <= high)


def _tokens(value: Any) -> bool:
    return _within(value, 0, MAX_TOKENS)


def _versions(value: Any) -> bool:
    return _within(value, -1, _MAX_VERSION)


def _keys(parts: int) -> Form:
    size = 8 * parts
    limits = _KEY_LIMITS[:parts]
    wide = np.array(limits, np.uint64)
    one = struct.Struct(f"<{parts}Q")  # a negative number is a huge one without its sign

    def accepts(value: Any) -> bool:
        if type(value) is not bytes or len(value) % size or len(value) > size * MAX_ENTRIES:
            return False
        if len(value) == size:
            return not any(map(gt, one.unpack(value), limits))
        return bool((np.frombuffer(value, np.uint64).reshape(-1, parts) <= wide).all())

    return accepts


def _tuple(*forms: Form) -> Form:
    def accepts(value: Any) -> bool:
        if type(value) is not list or len(value) != len(forms):
            return False
        for form, entry in zip(forms, value, strict=True):  # noqa: SIM110 - half as many calls
            if not form(entry):
                return False
        return True

    return accepts


def _layout(value: Any) -> bool:
    return type(value) is bytes and len(value) <= _MAX_LAYOUT


def _entries(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_ENTRIES


def _extents(value: Any) -> bool:
    return type(value) is list and len(value) <= _MAX_NAMES and all(map(_EXTENT, value))


def _commits(value: Any) -> bool:
    return type(value) is list and len(value) <= _MAX_NAMES and all(map(_is_commit, value))


def _is_commit(value: Any) -> bool:
    return type(value) is list and _fault("commit", value) is None


def _is_lease(value: Any) -> bool:
    return type(value) is list and _fault("lease", value) is None


def _written(value: Any) -> bool:
    if type(value) is not list or len(value) != 6:  # no `_tuple`: every put and commit has one
        return False
    shard, slot, start, nbytes, rows, layout = value
    return (
        type(shard) is type(slot) is type(start) is type(nbytes) is int
        and min(shard, slot, start, nbytes) >= 0
        and max(shard, slot, start, nbytes) <= _LIMIT
        and _entries(rows)
        and _layout(layout)
    )


def _memory(value: Any) -> bool:
    if type(value) is not list or len(value) != 2:
        return False
    return _count(value[1]) and (value[0] == [] or _extents(value[0]))


_EXTENT = _tuple(_count, _count)
_REF: tuple[Form, ...] = (_count, _whole, _rows)

_FORMS: Mapping[str, tuple[Form, ...]] = {
    "hello": (),
    "register": (_text, _names, _names, _flag, _names, _order, _count),
    "end": (_text,),
    "put": (
        _written, _keys(3), _tokens, _versions, _whole, _optional(_whole), _text, _whole,
        _optional(_seconds), _memory,
    ),
    "lend": (_count, _extents),
    "lease": (
        _text, _text, _optional(_whole), _optional(_whole), _optional(_whole), _text, _seconds,
        _seconds,
    ),
    "find": (*_REF, _names, _names),
    "missing": _REF,
    "commit": (
        *_REF, _optional(_written), _optional(_tokens), _optional(_versions), _optional(_whole),
        _memory,
    ),
    "turn": (_commits, _optional(_is_lease)),
    "renew": (_numbers, _seconds),
    "release": _REF,
    "evict": (_text,),
    "drop": (_keys(4), _text),
    "stats": (_count, _seconds),
    "layout": (_whole,),
    "memory": (),
    "checkpoint": (_whole,),
    "restore": (_whole,),
    "hurry": (_text, _text),
    "add_shard": (_text,),
    "notify": (_whole, _anything),
    "weights": (_whole, _seconds),
}  # fmt: skip


def check_call(name: str, m: Sequence[Any]) -> None:
    """Refuse a call of another form.

    Args:
        name: of the method, without `store.`.
        m: its arguments.

    Raises:
        WireDecodeError: which argument is wrong.
        DataError: a key is out of range: a user's, which no client looks at.
    """
    fault = _fault(name, m)
    if fault is not None:
        _check_keys(name, m)
        raise WireDecodeError(f"the call store.{name} is malformed: {fault}")


def _check_keys(name: str, m: Sequence[Any]) -> None:
    position, parts = _KEYS_OF.get(name, (0, 0))
    if not parts or len(m) <= position or type(m[position]) is not bytes:
        return
    if len(m[position]) % (8 * parts):
        return
    for key in np.frombuffer(m[position], np.int64).reshape(-1, parts).tolist():
        for part, value, limit in zip(Key._fields, key, _KEY_LIMITS, strict=False):
            if not 0 <= value <= limit:
                raise DataError(
                    f"the {part} of key {'/'.join(map(str, key))} is {value}; it is a whole number "
                    f"from 0 to {limit}"
                )


def _fault(name: str, m: Sequence[Any]) -> str | None:
    forms = _FORMS[name]
    if len(m) != len(forms):
        return f"it has {len(m)} arguments, {len(forms)} are expected"
    for form, value in zip(forms, m, strict=True):
        if not form(value):
            position = next(at for at, other in enumerate(m) if other is value)
            return f"argument {position} is {_shown(value)}"
    if name == "commit":
        rows = len(m[2]) // 8 if m[3] is None else m[3][4]
        if any(facts is not None and len(facts) != 4 * rows for facts in m[4:6]):
            return f"its tokens and versions are not for {rows} rows"
    return None


def _shown(value: Any) -> str:
    if type(value) is bytes:
        return f"{len(value)} bytes, too many, not whole numbers, or out of range"
    return f"{type(value).__name__} {value!r:.60}"
