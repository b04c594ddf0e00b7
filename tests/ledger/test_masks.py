"""Sets of rows as masks, against sets."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from asyncflow_core.ledger import positions_in, row_number, runs_in, runs_of, span
from asyncflow_core.ledger.masks import lowest

sets = st.sets(st.integers(0, 300)) | st.sets(st.integers(0, 20))


def mask_of(rows):
    return sum(1 << row for row in rows)


@given(sets)
def test_runs_and_positions_of_a_mask_are_its_rows_in_order(rows):
    runs = list(runs_in(mask_of(rows)))
    assert [row for first, last in runs for row in range(first, last)] == sorted(rows)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(runs))
    assert list(positions_in(mask_of(rows))) == sorted(rows)
    assert mask_of(rows) == sum(span(first, last) for first, last in runs)


@given(sets, st.integers(1, 310))
def test_lowest_of_a_mask_are_its_first_rows(rows, count):
    assert lowest(mask_of(rows), count) == mask_of(sorted(rows)[:count])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5) | st.integers(65530, 65535))))
def test_runs_of_rows_are_the_rows_in_their_order(places):
    rows = [row_number(*place) for place in places]
    runs = runs_of(tuple(rows))
    assert [row_number(n, p) for n, first, last in runs for p in range(first, last)] == rows
    assert runs_of(rows) == runs
