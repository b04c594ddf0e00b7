"""Numbers of a call as bytes."""

from __future__ import annotations

import numpy as np
import pytest

from asyncflow_core.batch import Column
from asyncflow_store_zmq.packed import dump_lengths, facts_of


@pytest.mark.parametrize("rows", [0, 1, 8, 9, 200])
@pytest.mark.parametrize("columns", [0, 1, 2])
def test_lengths_are_summed_over_columns_whatever_the_number_of_rows(rows, columns):
    random = np.random.default_rng(rows)
    lengths = random.integers(0, 50, (columns, rows))
    ragged = [
        Column.ragged([np.zeros(n) for n in row], dtype=np.float32).offsets for row in lengths
    ]
    shifted = [offsets + 7 for offsets in ragged]  # as of a batch cut out of a larger one
    for offsets in (ragged, shifted):
        assert facts_of(dump_lengths(offsets, rows)).tolist() == lengths.sum(axis=0).tolist()
