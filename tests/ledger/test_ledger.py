"""What the model test does not reach: order among equals, bounded memory, errors, cost."""

from __future__ import annotations

import pytest

from asyncflow_core.batch import BatchRef, GroupKey, Key
from asyncflow_core.errors import (
    BackpressureError,
    ConfigError,
    DataError,
    LeaseLostError,
    UnsupportedCapabilityError,
)
from asyncflow_core.ledger import Admission, Ledger
from asyncflow_core.services.data_store import Order, TaskSpec

GENERATE = TaskSpec("generate", ("prompt",), ("response",))
ADMITTED = TaskSpec("admitted", ("prompt",), order=Order.ADMITTED)


def make(*specs: TaskSpec, **kwargs) -> Ledger:
    ledger = Ledger(**{"capacity_rows": 1000, "capacity_bytes": 1000, **kwargs})
    for spec in specs or (GENERATE,):
        ledger.register(spec)
    return ledger


def put(ledger: Ledger, *sequences: int, samples: int = 1, tokens: int = 0, **kwargs) -> None:
    admission = Admission(("prompt",), samples, **kwargs)
    for sequence in sequences:
        ledger.put(GroupKey(0, 0, sequence), admission, tokens=tokens)


def take(ledger: Ledger, task: str = "generate", now: float = 0.0, **kwargs):
    lease = ledger.lease(now, task, requester="a", **kwargs)
    assert lease is not None
    return lease


def sequences(lease) -> list[int]:
    return [info.key.sequence for info in lease.rows]


def test_release_of_part_goes_before_what_waits_in_its_old_order():
    ledger = make()
    put(ledger, 0, 1, 2, 3, 4)
    lease = take(ledger, limit_rows=4)
    ledger.release(0.0, lease.ref(lease.rows[1:3]))
    assert sequences(take(ledger)) == [1, 2, 4]


def test_expiry_of_several_leases_keeps_the_order_of_their_rows():
    ledger = make()
    put(ledger, 0, 1, 2, 3, 4)
    take(ledger, limit_rows=2, lease_s=2.0)
    take(ledger, limit_rows=2, lease_s=1.0)
    assert sequences(take(ledger, now=3.0)) == [0, 1, 2, 3, 4]


def test_release_in_batch_goes_to_the_front_of_its_batch():
    ledger = make(ADMITTED)
    put(ledger, 0, batch=0)
    put(ledger, 1, 2, batch=1)
    lease = take(ledger, "admitted", version=1, limit_rows=2)
    ledger.release(0.0, lease.ref())
    assert sequences(take(ledger, "admitted", version=1)) == [0, 1, 2]


def test_lease_after_many_emptied_batches_gets_the_next():
    ledger = make(ADMITTED, capacity_rows=10_000)
    for batch in range(5000):
        put(ledger, batch, batch=batch)
    ledger.drop([Key(0, 0, batch, 0) for batch in range(4999)], reason="late")
    assert sequences(take(ledger, "admitted", version=5000)) == [4999]


def test_expiry_at_the_deadline_exactly_is_lost():
    ledger = make()
    put(ledger, 0)
    lease = take(ledger, lease_s=2.0)
    ledger.inspect(1.999, lease.ref())
    with pytest.raises(LeaseLostError):
        ledger.commit(2.0, lease.ref())


def test_clock_jump_extends_leases_by_the_gap():
    ledger = make(max_gap_s=5.0)
    put(ledger, 0)
    lease = take(ledger, lease_s=3.0)
    ledger.advance(1.0)
    ledger.advance(1000.0)
    assert ledger.next_deadline() is not None
    ledger.inspect(1001.9, lease.ref())
    with pytest.raises(LeaseLostError):
        ledger.commit(1002.0, lease.ref())


def test_clock_within_the_gap_expires_leases():
    ledger = make(max_gap_s=5.0)
    put(ledger, 0)
    lease = take(ledger, lease_s=3.0)
    ledger.advance(5.0)
    assert ledger.renew(5.0, [lease.lease_id], lease_s=1.0) == (lease.lease_id,)


def test_next_deadline_comes_before_a_silence_looks_like_a_jump():
    ledger = make(max_gap_s=5.0)
    put(ledger, 0)
    assert ledger.next_deadline() is None
    lease = take(ledger, lease_s=100.0)
    assert ledger.next_deadline() == 2.5
    ledger.commit(0.0, lease.ref())
    assert ledger.next_deadline() is None


def test_renew_never_shortens_a_lease():
    ledger = make()
    put(ledger, 0)
    lease = take(ledger, lease_s=4.0)
    assert ledger.renew(0.0, [lease.lease_id], lease_s=10.0) == ()
    assert ledger.renew(3.0, [lease.lease_id], lease_s=1.0) == ()
    ledger.inspect(5.0, lease.ref())


def test_commit_of_row_dropped_meanwhile_counts_it_and_commits_the_rest():
    ledger = make()
    put(ledger, 0, samples=2)
    lease = take(ledger)
    ledger.drop([Key(0, 0, 0, 0)], reason="late")
    assert ledger.inspect(0.0, lease.ref()).held == [1]
    result = ledger.commit(0.0, lease.ref())
    assert (result.committed, result.repeated, result.dropped) == (1, 0, 1)


def test_renew_of_finished_lease_is_not_lost():
    ledger = make()
    put(ledger, 0)
    lease = take(ledger)
    ledger.commit(0.0, lease.ref())
    assert ledger.renew(0.0, [lease.lease_id, 99], lease_s=1.0) == (99,)


def test_ended_lease_is_remembered_for_so_many_rows():
    ledger = make(remember_rows=2)
    put(ledger, 0, 1, 2, 3)
    leases = [take(ledger, limit_rows=1) for _ in range(4)]
    for lease in leases:
        ledger.commit(0.0, lease.ref())
    assert ledger.commit(0.0, leases[1].ref()).repeated == 1
    with pytest.raises(LeaseLostError):
        ledger.commit(0.0, leases[0].ref())


def test_commit_of_committed_and_lost_rows_together_writes_nothing():
    ledger = make()
    put(ledger, 0, 1)
    lease = take(ledger, lease_s=1.0)
    ledger.commit(0.0, lease.ref(lease.rows[:1]))
    with pytest.raises(LeaseLostError):
        ledger.commit(1.0, lease.ref())
    assert ledger.commit(1.0, lease.ref(lease.rows[:1])).repeated == 1
    assert ledger.stats().tasks["generate"].ready == 1


def test_commit_with_wrong_fence_or_foreign_row_is_lost():
    ledger = make()
    put(ledger, 0, 1)
    lease, other = take(ledger, limit_rows=1), take(ledger, limit_rows=1)
    with pytest.raises(LeaseLostError):
        ledger.commit(0.0, BatchRef(lease.lease_id, lease.fence + 1, lease.ref().rows))
    with pytest.raises(LeaseLostError):
        ledger.commit(0.0, BatchRef(lease.lease_id, lease.fence, other.ref().rows))


def test_commit_of_row_named_twice_is_refused():
    ledger = make()
    put(ledger, 0)
    lease = take(ledger)
    with pytest.raises(DataError, match="twice"):
        ledger.commit(0.0, BatchRef(lease.lease_id, lease.fence, lease.ref().rows * 2))


def test_known_keys_out_of_order_are_known_and_others_are_not():
    ledger = make()
    put(ledger, 0, 3, 1)
    known = [ledger.known(GroupKey(0, 0, sequence)) for sequence in range(5)]
    assert known == [True, True, False, True, False]
    assert not ledger.known(GroupKey(0, 1, 0))
    assert not ledger.known(GroupKey(1, 0, 0))
    put(ledger, 2)
    assert ledger.known(GroupKey(0, 0, 3))


def test_row_info_after_commit_has_tokens_and_oldest_version_zero():
    score = TaskSpec("score", ("response",))
    ledger = make(GENERATE, score)
    put(ledger, 0, tokens=5)
    lease = take(ledger)
    assert lease.rows[0].oldest_version is None
    ledger.commit(0.0, lease.ref(), tokens=[7], oldest=[0])
    (info,) = take(ledger, "score").rows
    assert (info.tokens, info.oldest_version) == (12, 0)


def test_drop_of_rest_after_completed_row_is_no_dropped_group():
    ledger = make()
    put(ledger, 0, samples=2)
    lease = take(ledger)
    ledger.commit(0.0, lease.ref(lease.rows[:1]))
    assert ledger.drop([Key(0, 0, 0, 1)], reason="late") == 1
    stats = ledger.stats()
    assert (stats.rows, stats.dropped_groups, stats.rows_dropped) == (0, (), {"late": 1})


def test_put_larger_than_store_and_put_without_room_are_told_apart():
    ledger = make(capacity_rows=2)
    with pytest.raises(BackpressureError, match="larger than the whole store"):
        ledger.fits(Admission(("prompt",), 3))
    put(ledger, 0, samples=2)
    assert not ledger.fits(Admission(("prompt",), 1))


def test_register_faults_are_told_together():
    ledger = make(GENERATE)
    with pytest.raises(ConfigError) as caught:
        ledger.register(TaskSpec("x", ("prompt", "response"), ("response",)))
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize("limits", [{"limit_rows": 0}, {"limit_tokens": -1}, {"lease_s": 0.0}])
def test_lease_with_limit_of_nothing_is_refused(limits):
    with pytest.raises(ConfigError, match=next(iter(limits))):
        make().lease(0.0, "generate", requester="a", **limits)


def test_policy_orders_within_its_window_only():
    class LargestFirst:
        window = 3

        def order(self, candidates, *, requester, holders):
            return sorted(candidates, key=lambda c: -c.tokens)

    ledger = make(policies={"largest": LargestFirst()})
    for sequence, tokens in enumerate([1, 5, 3, 9]):
        put(ledger, sequence, tokens=tokens)
    lease = take(ledger, policy="largest", limit_rows=1)
    assert sequences(lease) == [1]  # 9 tokens are beyond the window
    assert sequences(take(ledger)) == [0, 2, 3]  # what was looked at keeps its place
    with pytest.raises(UnsupportedCapabilityError, match="largest"):
        ledger.lease(0.0, "generate", requester="a", policy="smallest")


def test_ended_task_name_may_be_registered_anew_with_higher_fences():
    ledger = make()
    put(ledger, 0)
    first = take(ledger)
    ledger.leave("generate")
    ledger.register(TaskSpec("generate", ("prompt",)))
    put(ledger, 1)
    assert take(ledger).fence > first.fence


def test_churn_of_leases_keeps_no_deadlines_of_ended_ones():
    ledger = make()
    put(ledger, 0)
    for _ in range(1000):
        ledger.release(0.0, take(ledger, lease_s=1e6).ref())
    assert len(ledger._leases._deadlines) < 100
