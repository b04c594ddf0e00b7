"""Lease policies order what may be handed out."""

from __future__ import annotations

import contextlib
import copy

import pytest

from asyncflow_core.batch import GroupKey
from asyncflow_core.errors import InvariantError
from asyncflow_core.ledger import Admission, Ledger
from asyncflow_core.services.data_store import TaskSpec


@pytest.fixture(params=["one by one", "together"])
def filled(request):
    """Makes a ledger of rows (tokens, oldest version)."""

    def make(facts):
        ledger = Ledger(capacity_rows=100, capacity_bytes=0)
        ledger.register(TaskSpec("train", ("response_ids",)))
        admission = Admission(("response_ids",))
        if request.param == "together":
            tokens, versions = zip(*facts, strict=True)
            ages = [-1 if version is None else version for version in versions]
            ledger.intake(admission).put(GroupKey(0, 0, 0), tokens, ages)
        else:
            for sequence, (tokens, oldest) in enumerate(facts):
                key = GroupKey(0, 0, sequence)
                ledger.put(key, admission, tokens=tokens, oldest=oldest)
        return ledger

    return make


def leased(ledger, **how):
    lease = ledger.lease(0.0, "train", **{"requester": "a", **how})
    return [info.key.sequence for info in lease.rows]


def test_stalest_first_hands_out_the_oldest_version_first(filled):
    ledger = filled([(1, 5), (1, 3), (1, None), (1, 4)])
    assert leased(ledger, policy="stalest_first", limit_rows=2) == [1, 3]
    assert leased(ledger, policy="stalest_first") == [0, 2]


def test_token_balanced_gives_long_rows_to_who_holds_little(filled):
    ledger = filled([(5, 0), (9, 0), (1, 0), (7, 0), (3, 0)])
    assert leased(ledger, policy="token_balanced", limit_rows=2) == [1, 3]
    assert leased(ledger, policy="token_balanced", limit_rows=1, requester="b") == [0]
    assert leased(ledger, policy="token_balanced", limit_rows=1) == [2]


def test_policy_left_over_keeps_its_place_in_the_queue(filled):
    ledger = filled([(5, 0), (9, 0), (1, 0)])
    assert leased(ledger, policy="token_balanced", limit_rows=1) == [1]
    assert leased(ledger) == [0, 2]


def test_limit_in_tokens_hands_out_what_fits_and_at_least_a_row(filled):
    ledger = filled([(9, 0), (3, 0), (3, 0), (3, 0)])
    assert leased(ledger, limit_tokens=8) == [0]
    assert leased(ledger, limit_tokens=8) == [1, 2]
    assert leased(ledger, limit_tokens=8, limit_rows=5) == [3]


class Odd:
    """Of a plugin that does not keep its word."""

    window = 2

    def __init__(self, order):
        self._order = order

    def order(self, candidates, *, requester, holders):
        return self._order(candidates)


def with_policy(order, count=6):
    ledger = Ledger(capacity_rows=100, capacity_bytes=0, policies={"odd": Odd(order)})
    ledger.register(TaskSpec("train", ("response_ids",)))
    for sequence in range(count):
        ledger.put(GroupKey(0, 0, sequence), Admission(("response_ids",)), tokens=1)
    return ledger


def test_group_named_twice_is_handed_out_once():
    ledger = with_policy(lambda candidates: [*candidates, *candidates])
    assert leased(ledger, policy="odd") == [0, 1, 2, 3, 4, 5]
    assert ledger.lease(0.0, "train", requester="b") is None


def test_order_that_leaves_all_out_hands_out_nothing_and_ends():
    ledger = with_policy(lambda candidates: [])
    assert ledger.lease(0.0, "train", requester="a", policy="odd") is None
    assert leased(ledger) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("good", [0, 1])
def test_order_that_raises_loses_no_row(good):
    calls = []

    def order(candidates):
        calls.append(1)
        if len(calls) > good:
            raise RuntimeError("of a plugin")
        return candidates

    ledger = with_policy(order)
    with pytest.raises(RuntimeError, match="of a plugin"):
        leased(ledger, policy="odd")
    stats = ledger.stats().tasks["train"]
    assert (stats.ready, stats.leased) == (6, 0)
    assert leased(ledger) == [0, 1, 2, 3, 4, 5]


def none(_candidates):
    return [None]


def of_another_ledger(candidates):
    return [copy.copy(candidates[0])]


def taken_apart(candidates):
    return [candidates.pop() for _ in range(len(candidates))]


def no_list(_candidates):
    return None


def failing(candidates):
    yield candidates[1]
    raise ZeroDivisionError


def none_of_them(_candidates):
    return []


def the_first_twice(candidates):
    return [candidates[0], candidates[0]]


@pytest.mark.parametrize(
    "order",
    [none, of_another_ledger, taken_apart, no_list, failing, none_of_them, the_first_twice],
)
def test_policy_that_misbehaves_costs_no_row_its_place(order):
    class Policy:
        window = 64

        def order(self, candidates, *, requester, holders):
            with pytest.raises((TypeError, AttributeError)):
                holders.clear()
            return order(candidates)

    ledger = Ledger(capacity_rows=10, capacity_bytes=0, policies={"bad": Policy()})
    ledger.register(TaskSpec("train", ("response_ids",)))
    for sequence in range(4):
        ledger.put(GroupKey(0, 0, sequence), Admission(("response_ids",)))
    found = []
    with contextlib.suppress(InvariantError, AttributeError, TypeError, ZeroDivisionError):
        lease = ledger.lease(0.0, "train", requester="a", limit_rows=2, policy="bad")
        found = [info.key.sequence for info in lease.rows] if lease else []
    assert found + leased(ledger) == [0, 1, 2, 3]
