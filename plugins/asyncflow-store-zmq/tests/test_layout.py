"""Columns come out of a segment as they went in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_core.batch import Batch, Column
from asyncflow_core.errors import DataError
from asyncflow_store_zmq.layout import Layout, Piece, pack, take
from asyncflow_store_zmq.memory import Space, pieces_of
from asyncflow_store_zmq.places import place_of


def stored(batch):
    packed = pack(batch)
    data = np.zeros(packed.nbytes, np.uint8)
    packed.write(data)
    return data, Layout.load(packed.layout.dump())


@st.composite
def batches(draw):
    rows = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    return Batch(
        {
            "flat": Column.dense(np.arange(rows), np.float32),
            "wide": Column.dense(np.arange(rows * 6).reshape(rows, 2, 3), np.int16),
            "ids": Column.ragged([np.arange(n) for n in lengths], np.int32),
            "image": Column.ragged([np.ones((n, 3)) for n in lengths], np.float64),
            "words": Column.objects([{"n": n, "t": "x" * n} for n in lengths]),
        }
    )


@settings(deadline=None, max_examples=50)
@given(batches(), st.data())
def test_take_of_any_rows_equals_the_batch(batch, data):
    memory, layout = stored(batch)
    chosen = data.draw(st.lists(st.integers(0, batch.rows - 1), min_size=1))
    runs = pieces_of(np.array([place_of(7, row) for row in chosen]))
    pieces = [Piece(memory, layout, batch.rows, *run[1:]) for run in runs]
    found = take(pieces, list(batch))
    want = batch.take(chosen)
    for name, column in want.items():
        assert found[name].kind == column.kind
        if column.kind == "object":
            assert found[name].values == column.values
        else:
            assert found[name].array.dtype == column.array.dtype
            np.testing.assert_array_equal(found[name].array, column.array)
            if column.offsets is not None:
                np.testing.assert_array_equal(found[name].offsets, column.offsets)
    memory[:] = 255  # nothing that was taken looks at it
    np.testing.assert_array_equal(found["flat"].array, want["flat"].array)


def test_pack_of_object_without_plain_form_names_the_column():
    with pytest.raises(DataError, match="'odd'"):
        pack(Batch({"odd": Column.objects([object()])}))


def test_layout_of_other_bytes_is_refused():
    for data in (b"", b"\x01", b"\xc1", b"\x91\x94\xa1a\xa1b\xa2<i\x90"):
        with pytest.raises(DataError):
            Layout.load(data)


def test_space_gives_full_extents_back_once_their_segments_are_told():
    space = Space()
    assert space.take(1000) is None
    first, _ = space.take_from([0, 1, 4 << 20], 3 << 20)
    report = space.report()
    space.add(report, [0, 5, 4 << 20])
    second, start = space.take(3 << 20)
    assert (second.slot, start) == (5, 5 << 20)
    assert space.full() == []
    first.writing -= 1
    assert space.full() == [[0, 1]]
