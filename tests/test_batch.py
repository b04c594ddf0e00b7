"""Columns and batches: rows are taken and joined without changing what they are."""

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column, Key
from asyncflow_core.errors import DataError

COLUMNS = {
    "ragged": Column.ragged([[1, 2], [], [3]], np.int32),
    "runs": Column.ragged([[[0, 3]], [[0, 1], [1, 2]], [[2, 1]]], np.int32),
    "dense": Column.dense([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32),
    "object": Column.objects(["a", None, {"b": 1}]),
}


def plain(column):
    return [e.tolist() if isinstance(e, np.ndarray) else e for e in column]


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("rows", [[2, 0], [1], [0, 0, 1], []])
def test_take_gives_the_rows_in_order_and_keeps_dtype_and_axes(name, rows):
    column = COLUMNS[name]
    taken = column.take(rows)
    assert plain(taken) == [plain(column)[row] for row in rows]
    assert taken.kind == column.kind
    if taken.kind != "object":
        assert taken.array.dtype == column.array.dtype
        assert taken.array.shape[1:] == column.array.shape[1:]


@pytest.mark.parametrize("name", COLUMNS)
def test_concat_of_taken_parts_is_the_whole(name):
    column = COLUMNS[name]
    joined = Column.concat([column.take([0]), column.take([]), column.take([1, 2])])
    assert plain(joined) == plain(column)
    assert joined.kind == column.kind


def test_concat_of_different_kinds_is_refused():
    with pytest.raises(DataError, match="cannot join columns of kinds"):
        Column.concat([COLUMNS["dense"], COLUMNS["object"]])


def test_batch_of_unequal_columns_names_them():
    with pytest.raises(DataError, match=r"3 rows, but got \{'b': 2\}"):
        Batch({"a": COLUMNS["dense"], "b": COLUMNS["dense"].take([0, 1])})


def test_batch_concat_of_other_columns_is_refused():
    one, other = Batch({"a": COLUMNS["dense"]}), Batch({"b": COLUMNS["dense"]})
    with pytest.raises(DataError, match="cannot join batches of columns"):
        Batch.concat([one, other])


def test_batch_without_columns_has_the_rows_it_was_given():
    assert Batch({}, rows=4).rows == 4
    assert Batch(COLUMNS).take([]).rows == 0


def test_key_survives_packing_and_says_what_is_too_short():
    key = Key(1, 2, 1 << 40, 7)
    assert Key.unpack(key.pack()) == key
    with pytest.raises(DataError, match="16 bytes, got 3"):
        Key.unpack(b"abc")


@pytest.mark.parametrize("make", [Column.dense, lambda rows, dtype: Column.ragged([rows], dtype)])
@pytest.mark.parametrize(
    ("values", "dtype", "wrong"),
    [
        ([1, 0.5], np.int32, "0.5"),
        ([2**31], np.int32, f"{2**31}"),
        (np.array([-1]), np.uint8, "-1"),
        ([1, np.nan], np.int32, "nan"),
        ([np.inf], np.int64, "inf"),
    ],
)
def test_column_number_that_its_integers_cannot_hold_is_refused(make, values, dtype, wrong):
    with pytest.raises(DataError, match=f"^{wrong} is not a whole number that .*int"):
        make(values, dtype)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([], np.int32), ([1.0, 2.0], np.int32), ([True], np.uint8), ([0.1], np.float32), ([3], float)],
)
def test_column_numbers_that_fit_are_brought_to_the_dtype(values, dtype):
    found = Column.ragged([values], dtype).array
    assert found.dtype == dtype
    assert found.tolist() == np.array(values, dtype).tolist()
