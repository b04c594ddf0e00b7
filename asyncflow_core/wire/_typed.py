"""Plain values to the types a signature announces; nothing on the wire chooses a type."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

from asyncflow_core.batch import Batch, Column, GroupKey, Key
from asyncflow_core.errors import DataError, WireDecodeError

__all__ = ["Builder", "CannotCrossError", "builder"]

Convert = Callable[[Any], Any]
_SCALARS: Mapping[Any, tuple[type, ...]] = {
    type(None): (type(None),), None: (type(None),), bool: (bool,), int: (int,),
    float: (float, int), str: (str,), bytes: (bytes,), Key: (Key,), GroupKey: (GroupKey,),
}  # fmt: skip


class CannotCrossError(TypeError):
    """A type no message can hold: an iterator, a function, a live object."""


class _MismatchError(Exception):
    """A value is not of the announced type; `path` grows on the way out."""

    def __init__(self, got: Any, allowed: str) -> None:
        text = repr(got) if isinstance(got, None | bool | int | float | str) else ""
        text = text if len(text) <= 60 else text[:60] + "..."
        super().__init__(f"got {type(got).__name__} {text}".rstrip() + f", allowed: {allowed}")
        self.path: list[str] = []


class Builder:
    """Compiles a converter for each type once.

    Args:
        strict: refuse dataclass fields unknown here; else ignore them.
    """

    def __init__(self, *, strict: bool) -> None:
        """Start without converters."""
        self._strict = strict
        self._converters: dict[Any, Convert] = {
            Any: _keep,
            object: _keep,
            Column: _column,
            Batch: _batch,
            np.ndarray: _array(None),
        }

    def build(self, annotation: Any, value: Any, name: str = "value") -> Any:
        """The value as `annotation`.

        Raises:
            WireDecodeError: it is not; names where, what was there, and what is allowed.
            CannotCrossError: the annotation is no type of values.
        """
        try:
            return self.converter(annotation)(value)
        except _MismatchError as error:
            raise WireDecodeError(f"{'.'.join([name, *error.path])}: {error}") from None
        except RecursionError:
            raise WireDecodeError(f"{name}: nests too deep") from None

    def converter(self, annotation: Any) -> Convert:
        """The converter of a type.

        Raises:
            CannotCrossError: values of the type cannot be in a message.
        """
        try:
            return self._converters[annotation]
        except KeyError:
            pass
        # A type that contains itself finds this, not itself half made.
        self._converters[annotation] = lambda value: self._converters[annotation](value)
        try:
            self._converters[annotation] = self._compile(annotation)
        except BaseException:
            del self._converters[annotation]
            raise
        return self._converters[annotation]

    def _compile(self, annotation: Any) -> Convert:
        if annotation in _SCALARS:
            return _scalar(annotation)
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is not None:
            return self._compile_generic(annotation, origin, arguments)
        if isinstance(annotation, type):
            if issubclass(annotation, Enum):
                return _enum(annotation)
            if dataclasses.is_dataclass(annotation):
                return self._dataclass(annotation)
            if annotation in (list, tuple, dict, frozenset, set):
                return self._compile_generic(annotation, annotation, ())
        raise CannotCrossError(f"a value of type {annotation!r} cannot cross a wire")

    def _compile_generic(self, annotation: Any, origin: Any, arguments: tuple[Any, ...]) -> Convert:
        if origin in (typing.Union, types.UnionType):
            return self._union(arguments)
        if origin is typing.Literal:
            return _literal(arguments)
        if origin is np.ndarray:
            kinds = typing.get_args(arguments[1])
            return _array(None if not kinds or kinds[0] is Any else np.dtype(kinds[0]))
        if origin is typing.Annotated:
            return self.converter(arguments[0])
        if origin is tuple and arguments and arguments[-1] is not Ellipsis:
            return _fixed_tuple([self.converter(argument) for argument in arguments])
        inner = [self.converter(argument) for argument in arguments if argument is not Ellipsis]
        if origin in (list, tuple, set, frozenset, Sequence):
            make = tuple if origin is Sequence else origin
            return _entries(make, inner[0] if inner else _keep)
        if origin in (dict, Mapping):
            return _map(*inner) if inner else _map(_keep, _keep)
        raise CannotCrossError(f"a value of type {annotation!r} cannot cross a wire")

    def _union(self, members: tuple[Any, ...]) -> Convert:
        optional = type(None) in members
        converts = [self.converter(m) for m in members if m is not type(None)]
        allowed = " or ".join(getattr(member, "__name__", str(member)) for member in members)

        def convert(value: Any) -> Any:
            if value is None and optional:
                return None
            if len(converts) == 1:
                return converts[0](value)
            for attempt in converts:
                try:
                    return attempt(value)
                except _MismatchError:
                    continue
            raise _MismatchError(value, allowed)

        return convert

    def _dataclass(self, cls: type) -> Convert:
        hints = typing.get_type_hints(cls)
        fields = [field for field in dataclasses.fields(cls) if field.init]
        # The plain type of a field, where it has one, saves most values a call.
        converts = {
            field.name: (_plain_type(hints[field.name]), self.converter(hints[field.name]))
            for field in fields
        }
        required = frozenset(
            field.name
            for field in fields
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        strict, known = self._strict, sorted(converts)

        def convert(value: Any) -> Any:
            if type(value) is not dict:
                raise _MismatchError(value, f"a map of the fields of {cls.__name__}")
            if not required <= value.keys():
                missing = sorted(required - value.keys())
                raise _MismatchError(value, f"{cls.__name__} with its fields {missing}")
            found, name = {}, ""
            try:
                for name, entry in value.items():
                    field = converts.get(name)
                    if field is not None:
                        found[name] = entry if type(entry) is field[0] else field[1](entry)
                    elif strict:
                        raise _MismatchError(
                            entry, f"the fields of {cls.__name__} known here, {known}"
                        )
            except _MismatchError as error:
                error.path.insert(0, str(name))
                raise
            try:
                return cls(**found)
            except (TypeError, ValueError, LookupError, ArithmeticError) as error:
                raise _MismatchError(value, f"a valid {cls.__name__} ({error})") from None

        return convert


@functools.cache
def builder(*, strict: bool) -> Builder:
    """The process's builder of that kind; `strict` for arguments, else for results."""
    return Builder(strict=strict)


def is_stream(annotation: Any) -> bool:
    """Whether it is `AsyncIterator[X]` (or an async generator or iterable)."""
    origin = typing.get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, AsyncIterator)


def _keep(value: Any) -> Any:
    return value


def _plain_type(annotation: Any) -> type | None:
    """The type a value may have and stay as it is."""
    members = [m for m in typing.get_args(annotation) or (annotation,) if m is not type(None)]
    union = typing.get_origin(annotation) in (None, typing.Union, types.UnionType)
    return members[0] if union and len(members) == 1 and members[0] in _SCALARS else None


def _scalar(annotation: Any) -> Convert:
    allowed = _SCALARS[annotation]
    exact, name = allowed[0], "null" if annotation in (None, type(None)) else annotation.__name__
    make_float = annotation is float

    def convert(value: Any) -> Any:
        if type(value) is exact:
            return value
        if type(value) not in allowed:
            raise _MismatchError(value, name)
        return float(value) if make_float else value

    return convert


def _enum(cls: type[Enum]) -> Convert:
    def convert(value: Any) -> Any:
        try:
            return cls(value)
        except (ValueError, TypeError):
            raise _MismatchError(value, f"one of {[member.value for member in cls]}") from None

    return convert


def _literal(allowed: tuple[Any, ...]) -> Convert:
    def convert(value: Any) -> Any:
        for choice in allowed:
            if type(choice) is type(value) and choice == value:
                return choice
        raise _MismatchError(value, f"one of {list(allowed)}")

    return convert


def _array(dtype: np.dtype[Any] | None) -> Convert:
    allowed = "an array" if dtype is None else f"an array of dtype {dtype}"

    def convert(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise _MismatchError(value, allowed)
        if dtype is not None and value.dtype != dtype:
            raise _MismatchError(str(value.dtype), allowed)
        return value

    return convert


def _entries(make: Any, entry: Convert) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is not list:
            raise _MismatchError(value, "a list")
        if entry is _keep:
            return make(value)
        found: list[Any] = []
        try:
            for item in value:
                found.append(entry(item))  # noqa: PERF401  the length names the faulty entry
        except _MismatchError as error:
            error.path.insert(0, f"[{len(found)}]")
            raise
        return found if make is list else make(found)

    return convert


def _fixed_tuple(converts: list[Convert]) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is not list or len(value) != len(converts):
            raise _MismatchError(value, f"a list of {len(converts)} entries")
        return tuple(entry(item) for entry, item in zip(converts, value, strict=True))

    return convert


def _map(key: Convert, entry: Convert) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is not dict:
            raise _MismatchError(value, "a map")
        name: Any = ""
        found = {}
        try:
            for name, item in value.items():
                found[key(name)] = entry(item)
        except _MismatchError as error:
            error.path.insert(0, str(name))
            raise
        return found

    return convert


def _column(value: Any) -> Column:
    if type(value) is not dict or not value.keys() <= {"values", "offsets"}:
        raise _MismatchError(value, "a column")
    values, offsets = value.get("values"), value.get("offsets")
    if offsets is None:
        if type(values) is list or (isinstance(values, np.ndarray) and values.ndim):
            return Column(values)
        raise _MismatchError(values, "an array with a row axis, or a list")
    if not isinstance(values, np.ndarray) or values.ndim == 0:
        raise _MismatchError(values, "an array with an axis of values")
    if not isinstance(offsets, np.ndarray) or offsets.dtype != np.int64 or offsets.ndim != 1:
        raise _MismatchError(offsets, "offsets int64 [rows + 1]")
    ends = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(values)
    # Compared, not subtracted: differences of hostile offsets may wrap around.
    if not ends or bool(np.any(offsets[1:] < offsets[:-1])):
        raise _MismatchError(offsets, f"offsets that rise from 0 to the {len(values)} values")
    return Column(values, offsets)


def _batch(value: Any) -> Batch:
    if type(value) is not dict or value.keys() != {"rows", "columns"}:
        raise _MismatchError(value, "a batch")
    rows, columns = value["rows"], value["columns"]
    if type(rows) is not int or rows < 0 or type(columns) is not dict:
        raise _MismatchError(value, "a batch of named columns")
    found, name = {}, ""
    try:
        for name, column in columns.items():
            if type(name) is not str:
                raise _MismatchError(name, "a column name")
            found[name] = _column(column)
    except _MismatchError as error:
        error.path.insert(0, str(name))
        raise
    try:
        return Batch(found, rows=rows)
    except DataError as error:
        raise _MismatchError(rows, f"columns of equal length ({error})") from None
