"""Canonical columns: what is not of the schema is named by row, column and value."""

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow_core.batch import Batch, Column, Key
from asyncflow_core.errors import DataError
from asyncflow_core.schema import validate

KEYS = [Key(0, 0, 0, 0), Key(0, 0, 7, 1)]
RESPONSES = Column.ragged([[1], [2, 3]], np.int32)


def ragged(first, second, dtype=np.float32):
    return Column.ragged([first, second], dtype)


@pytest.mark.parametrize(
    ("name", "column", "expected"),
    [
        ("reward", Column.dense([1, np.inf], np.float32), "row 0/0/7/1: column 'reward' holds inf"),
        ("reward", Column.dense([[1], [2]], np.float32), "'reward' holds numbers, got arrays of"),
        ("reward", Column.dense([1, 2], np.float64), "'reward' must be float32, got float64"),
        ("reward", Column.objects([1.0, 2.0]), "'reward' must be dense, got object"),
        ("response_ids", ragged([1], [-2], np.int32), "0/0/7/1: column 'response_ids' holds -2"),
        ("prompt_ids", ragged([[1]], [[2]], np.int32), "'prompt_ids' holds numbers, got arrays"),
        ("advantages", ragged([1], [2]), "row 0/0/7/1: column 'advantages' has 1 entries, but"),
        ("advantages", ragged([[1]], [[1], [2]]), "'advantages' holds numbers, got arrays of (1,)"),
        ("values", ragged([0], [0, np.nan]), "row 0/0/7/1: column 'values' holds nan; it must be"),
        ("versions", ragged([1], [2], np.int32), "'versions' must have shape [runs, 2]"),
        ("versions", ragged([[0, 1]], [[0, 3]], np.int32), "'versions' counts 3 tokens, but"),
        ("versions", ragged([[0, 1]], [[-1, 2]], np.int32), "has the run [-1, 2]; a run is"),
        ("finish_reason", Column.objects(["stop", 3]), "0/0/7/1: column 'finish_reason' holds 3"),
    ],
)
def test_validate_column_against_the_schema_is_named(name, column, expected):
    columns = {name: column}
    with pytest.raises(DataError) as found:
        validate(Batch(columns), KEYS, response=RESPONSES)
    assert expected in str(found.value)


def test_validate_sound_columns_and_columns_of_other_names_pass():
    columns = {
        "response_ids": RESPONSES,
        "versions": ragged([[0, 1]], [[0, 1], [1, 1]], np.int32),
        "advantages": ragged([0.5], [1, -1]),
        "reward": Column.dense([0, 1], np.float32),
        "finish_reason": Column.objects(["stop", "length"]),
        "mine": Column.dense(np.full((2, 3), np.nan)),
    }
    validate(Batch(columns), KEYS)


@given(
    st.lists(st.floats(width=32) | st.sampled_from([np.nan, np.inf, -np.inf]), max_size=40),
    st.lists(st.integers(-3, 2**31 - 1), max_size=40),
)
def test_validate_refuses_just_the_numbers_no_row_may_hold(floats, ids):
    columns = {"response_ids": ragged(ids, [], np.int32), "values": ragged(floats, [])}
    bad = {
        "response_ids": any(token < 0 for token in ids),
        "values": not all(map(math.isfinite, floats)),
    }
    for name, column in columns.items():
        with pytest.raises(DataError) if bad[name] else contextlib.nullcontext():
            validate(Batch({name: column}), KEYS)
