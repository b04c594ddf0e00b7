"""Starting prompts late enough to be fresh, and early enough to be there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow_core.flow.running.pacing import Pacing

STEP_S = 2.0


def simulate(bound, rollout_s, steps=200, step_s=STEP_S):
    """A trainer of `step_s` and a rollout of `rollout_s` a batch, one batch at a time.

    Returns the steps' ends, the staleness of each batch's start, and the trainer's waits.
    """
    pacing = Pacing(bound)
    ends, stale, waits = [0.0], [], []
    opened = [0.0] * (bound + 1)
    free = 0.0
    for batch in range(steps):
        start = max(free, opened[batch])
        stale.append(batch - sum(end <= start for end in ends[1 : batch + 1]))
        ready = free = start + rollout_s
        waited = max(0.0, ready - ends[-1])
        waits.append(waited)
        began = ends[-1]
        ends.append(began + waited + step_s)
        pacing.stepped(slack_s=began - ready, waited_s=waited, step_s=ends[-1] - began)
        opened.append(max(opened[-1], ends[-1] + pacing.delay_s))
    return ends, stale, waits


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_fast_rollout_settles_just_ahead_of_the_trainer(bound):
    ends, stale, waits = simulate(bound, rollout_s=0.4 * STEP_S)
    assert max(stale) <= bound
    assert stale[-50:] == [1] * 50, "one step ahead is what it takes, whatever the bound"
    assert sum(waits[20:]) < 0.02 * (ends[-1] - ends[20])


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_slow_rollout_is_never_held_back(bound):
    ends, _, _ = simulate(bound, rollout_s=1.3 * STEP_S)
    assert ends[-1] == pytest.approx(200 * 1.3 * STEP_S + STEP_S, rel=0.01)


def test_rollout_that_becomes_slow_is_started_at_once_again():
    pacing = Pacing(4)
    for _ in range(100):
        pacing.stepped(slack_s=3 * STEP_S, waited_s=0.0, step_s=STEP_S)
    assert pacing.delay_s > STEP_S
    for _ in range(4):
        pacing.stepped(slack_s=-2 * STEP_S, waited_s=2 * STEP_S, step_s=3 * STEP_S)
    assert pacing.delay_s == 0


@given(
    st.integers(0, 8),
    st.lists(st.tuples(st.floats(-1e4, 1e4), st.floats(0, 1e4), st.floats(1e-3, 1e4)), max_size=60),
)
def test_delay_stays_within_what_the_bound_allows(bound, steps):
    pacing = Pacing(bound)
    for slack_s, waited_s, step_s in steps:
        pacing.stepped(slack_s=slack_s, waited_s=waited_s, step_s=step_s)
        assert 0 <= pacing.delay_s <= bound * step_s
