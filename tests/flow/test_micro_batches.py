"""Splitting rows over ranks and micro-batches."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow_core.flow.working.micro_batches import split

many = st.lists(st.integers(0, 60), max_size=40)


@given(many, st.integers(1, 5), st.integers(1, 100))
def test_split_any_rows_holds_shape_and_limit(tokens, ranks, limit):
    parts = split(tokens, ranks=ranks, limit_tokens=limit)
    assert parts  # every rank gets at least one, so that collectives match
    assert {len(part) for part in parts} == {ranks}
    rows = [row for part in parts for rank in part for row in rank]
    assert sorted(rows) == list(range(len(tokens)))
    for rank in (rank for part in parts for rank in part):
        assert rank == sorted(rank)
        assert sum(tokens[row] for row in rank) <= limit or len(rank) == 1
    assert parts == split(tokens, ranks=ranks, limit_tokens=limit)


@given(many, st.integers(1, 5), st.integers(1, 100))
def test_split_any_rows_balances_within_the_longest_row(tokens, ranks, limit):
    parts = split(tokens, ranks=ranks, limit_tokens=limit)
    loads = [sum(tokens[row] for row in rank) for part in parts for rank in part]
    longest = max(tokens, default=0)
    assert max(loads) - min(loads) <= longest
    # Ranks of one round finish together: no round is wider than the one order of all loads.
    assert loads == sorted(loads, reverse=True)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3))
def test_split_in_one_round_is_within_four_thirds_of_the_best(tokens, ranks):
    (part,) = split(tokens, ranks=ranks, limit_tokens=sum(tokens))
    worst = max(sum(tokens[row] for row in rank) for rank in part)
    best = min(
        max(
            sum(t for t, r in zip(tokens, places, strict=True) if r == rank)
            for rank in range(ranks)
        )
        for places in product(range(ranks), repeat=len(tokens))
    )
    assert worst <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def test_split_without_rows_gives_one_empty_micro_batch():
    assert split([], ranks=3, limit_tokens=10) == [[[], [], []]]


@pytest.mark.parametrize("limit", [1, 5, 10])
def test_split_row_over_the_limit_goes_alone(limit):
    parts = split([3, 50, 2], ranks=1, limit_tokens=limit)
    assert [1] in [rank for part in parts for rank in part]


def test_split_many_rows_is_fast_enough():
    tokens = [(17 * row) % 977 + 1 for row in range(4096)]
    parts = split(tokens, ranks=2, limit_tokens=16384)
    assert len(parts) <= 1.1 * sum(tokens) / (2 * 16384) + 1
