"""Lease policies order what may be handed out."""

from __future__ import annotations

from asyncflow_core.batch import GroupKey
from asyncflow_core.ledger import Admission, Ledger
from asyncflow_core.services.data_store import TaskSpec


def filled(facts):
    ledger = Ledger(capacity_rows=100, capacity_bytes=0)
    ledger.register(TaskSpec("train", ("response_ids",)))
    for sequence, (tokens, oldest) in enumerate(facts):
        ledger.put(
            GroupKey(0, 0, sequence), Admission(("response_ids",)), tokens=tokens, oldest=oldest
        )
    return ledger


def leased(ledger, **how):
    lease = ledger.lease(0.0, "train", **{"requester": "a", **how})
    return [info.key.sequence for info in lease.rows]


def test_stalest_first_hands_out_the_oldest_version_first():
    ledger = filled([(1, 5), (1, 3), (1, None), (1, 4)])
    assert leased(ledger, policy="stalest_first", limit_rows=2) == [1, 3]
    assert leased(ledger, policy="stalest_first") == [0, 2]


def test_token_balanced_gives_long_rows_to_who_holds_little():
    ledger = filled([(5, 0), (9, 0), (1, 0), (7, 0), (3, 0)])
    assert leased(ledger, policy="token_balanced", limit_rows=2) == [1, 3]
    assert leased(ledger, policy="token_balanced", limit_rows=1, requester="b") == [0]
    assert leased(ledger, policy="token_balanced", limit_rows=1) == [2]


def test_policy_left_over_keeps_its_place_in_the_queue():
    ledger = filled([(5, 0), (9, 0), (1, 0)])
    assert leased(ledger, policy="token_balanced", limit_rows=1) == [1]
    assert leased(ledger) == [0, 2]
