"""The canonical columns: their meaning, dtype and shape, and the check every put and commit passes.

A row is one trajectory. Its tokens are `prompt_ids` followed by `response_ids`; every per-token
column covers the response only, so its length is that of `response_ids`. Shape letters: P prompt
tokens, T response tokens, R runs of equal version.

Behaviour log-probs are log softmax(logits / temperature) over the whole vocabulary, as sampled;
what truncated the draw (top-p, top-k, min-p) stands in `sampling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from asyncflow_core.batch import Batch, Column, Key
from asyncflow_core.errors import DataError

__all__ = [
    "CANONICAL",
    "FINISH_REASONS",
    "PER_TOKEN",
    "ColumnSpec",
    "oldest_version",
    "token_count",
    "validate",
]

FINISH_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """What a canonical column holds.

    Attributes:
        kind: as `Column.kind`.
        dtype: numpy dtype name, "" for objects.
        per: what the length of a ragged row must equal: the response, or nothing.
        doc: one line for people.
    """

    kind: Literal["dense", "ragged", "object"]
    dtype: str
    per: Literal["response", "row"]
    doc: str


CANONICAL: Mapping[str, ColumnSpec] = {
    "prompt_ids": ColumnSpec("ragged", "int32", "row", "token ids of the prompt [P]"),
    "response_ids": ColumnSpec("ragged", "int32", "row", "token ids of the response [T]"),
    "behaviour_logprobs": ColumnSpec("ragged", "float32", "response", "as sampled [T]"),
    "loss_mask": ColumnSpec("ragged", "uint8", "response", "1 where a token is trained [T]"),
    "advantages": ColumnSpec("ragged", "float32", "response", "per token [T]"),
    "ref_logprobs": ColumnSpec("ragged", "float32", "response", "of a frozen reference [T]"),
    "proximal_logprobs": ColumnSpec("ragged", "float32", "response", "at the step's start [T]"),
    "values": ColumnSpec("ragged", "float32", "response", "of a critic [T]"),
    "versions": ColumnSpec("ragged", "int32", "row", "(version, count) runs [R, 2]"),
    "reward": ColumnSpec("dense", "float32", "row", "of the whole trajectory"),
    "finish_reason": ColumnSpec("object", "", "row", f"one of {FINISH_REASONS}"),
    "sampling": ColumnSpec("object", "", "row", "the SamplingParams as a dict"),
}

_DTYPES = {name: np.dtype(spec.dtype) for name, spec in CANONICAL.items() if spec.dtype}
_IDS = frozenset(("prompt_ids", "response_ids"))

PER_TOKEN = tuple(name for name, spec in CANONICAL.items() if spec.per == "response")


def _has_type(name: str, column: Column) -> bool:
    """The common case, at once: every column of every put and commit passes here."""
    spec, values = CANONICAL[name], column.values
    if isinstance(values, list):
        return spec.kind == "object" and column.offsets is None
    return (
        spec.kind != "object"
        and values.dtype == _DTYPES[name]
        and (column.offsets is not None) == (spec.kind == "ragged")
        and values.shape[1:] == ((2,) if name == "versions" else ())
    )


def _check_type(name: str, column: Column) -> None:
    if _has_type(name, column):
        return
    spec = CANONICAL[name]
    if column.kind != spec.kind:
        raise DataError(f"column {name!r} must be {spec.kind}, got {column.kind}")
    if spec.dtype and column.array.dtype != _DTYPES[name]:
        raise DataError(f"column {name!r} must be {spec.dtype}, got {column.array.dtype}")
    if name == "versions" and (column.array.ndim != 2 or column.array.shape[1] != 2):
        raise DataError(f"column 'versions' must have shape [runs, 2], got {column.array.shape}")
    if name != "versions" and spec.dtype and column.array.ndim != 1:
        raise DataError(f"column {name!r} holds numbers, got arrays of {column.array.shape[1:]}")


def _first(bad: Any) -> int | None:
    flags = np.asarray(bad, bool)
    first = int(flags.argmax()) if len(flags) else 0
    return first if len(flags) and flags[first] else None


def _row_of(column: Column, value: int) -> int:
    """Which row the entry at `value` of a column's array belongs to."""
    if column.offsets is None:
        return value
    return int(np.searchsorted(column.offsets, value, side="right")) - 1


def _check_lengths(name: str, column: Column, response: Column, keys: Sequence[Key]) -> None:
    ours, theirs = column.offsets, response.offsets
    if ours is not None and theirs is not None and ours.tobytes() == theirs.tobytes():
        return
    row = _first(column.lengths != response.lengths)
    if row is not None:
        raise DataError(
            f"row {keys[row]}: column {name!r} has {column.lengths[row]} entries, but "
            f"'response_ids' has {response.lengths[row]}; they must agree"
        )


def _check_versions(column: Column, response: Column | None, keys: Sequence[Key]) -> None:
    runs, counts = column.array, column.array[:, 1]
    value = _first((counts < 1) | (runs[:, 0] < 0))
    if value is not None:
        raise DataError(
            f"row {keys[_row_of(column, value)]}: column 'versions' has the run "
            f"{runs[value].tolist()}; a run is (version >= 0, count >= 1)"
        )
    if response is None:
        return
    ends = np.concatenate([[0], np.cumsum(counts)])[column.offsets]
    row = _first(np.diff(ends) != response.lengths)
    if row is not None:
        raise DataError(
            f"row {keys[row]}: column 'versions' counts {ends[row + 1] - ends[row]} tokens, but "
            f"'response_ids' has {response.lengths[row]}; they must agree"
        )


def _check_values(name: str, column: Column, keys: Sequence[Key]) -> None:
    values = column.values
    if name == "finish_reason":
        bad = _first([entry not in FINISH_REASONS for entry in column])
        allowed = f"allowed are {', '.join(FINISH_REASONS)}"
    elif isinstance(values, list) or not len(values):
        return
    # Where the extremes are is found without the machinery of numpy's functions, which is most of
    # what a check of one row would cost. NaN counts as both extremes.
    elif name in _IDS:
        if values.item(values.argmin()) >= 0:
            return
        bad, allowed = _first(values < 0), "token ids are >= 0"
    elif CANONICAL[name].dtype == "float32":
        least, most = values.item(values.argmin()), values.item(values.argmax())
        if math.isfinite(least) and math.isfinite(most):
            return
        bad, allowed = _first(~np.isfinite(values)), "it must be finite"
    else:
        return
    if bad is not None:
        row = _row_of(column, bad)
        value = column.values[bad] if column.kind == "object" else column.array[bad].item()
        raise DataError(f"row {keys[row]}: column {name!r} holds {value!r}; {allowed}")


def validate(batch: Batch, keys: Sequence[Key], *, response: Column | None = None) -> None:
    """Check the canonical columns of a batch; columns of other names are the user's own.

    Args:
        batch: rows to be put or committed.
        keys: the rows' keys, named in errors.
        response: `response_ids` of the same rows when the batch does not carry it itself.

    Raises:
        DataError: naming the row, the column, both values.
    """
    if len(keys) != batch.rows:
        raise DataError(f"a batch of {batch.rows} rows came with {len(keys)} keys")
    response = batch.get("response_ids", response)
    for name, column in batch.items():
        if name not in CANONICAL:
            continue
        _check_type(name, column)
        _check_values(name, column, keys)
        if name == "versions":
            _check_versions(column, response, keys)
        elif name in PER_TOKEN and response is not None:
            _check_lengths(name, column, response, keys)


def oldest_version(versions: Any) -> int | None:
    """The oldest version among a row's runs [R, 2]; None for a row without tokens."""
    return int(versions[:, 0].min()) if len(versions) else None


def token_count(columns: Mapping[str, Any]) -> int:
    """Tokens of one row: prompt and response, as far as they are there."""
    return sum(len(columns[name]) for name in ("prompt_ids", "response_ids") if name in columns)
