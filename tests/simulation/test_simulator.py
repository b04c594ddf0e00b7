"""A run on virtual time: what no run can do better than, and what it must do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_core.errors import ConfigError
from asyncflow_core.flow.simulation.bounds import lower_bound, lower_bounds
from asyncflow_core.flow.simulation.simulator import simulate
from asyncflow_core.flow.simulation.times import Lengths, Times
from asyncflow_core.flow.simulation.workload import Allocation

from .conftest import preset, workload

GROUPS, SIZE = 4, 2
STEPS = 10
PRESETS = [("sequential", None), ("streaming", None), ("delayed", None)]
PRESETS += [("async", bound) for bound in (1, 2, 4)]


def times(lengths, **changes):
    """A second a token, and a little for the rest."""
    found = {
        "lengths": {"groups": lengths},
        "rollout": {"token_s": 1.0},
        "stages": {"reward": {"row_s": 0.5}, "advantage": {"row_s": 0.25}},
        "trainer": {"token_s": 0.5, "update_s": 0.25},
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        found[section] = {**found.get(section, {}), key: value} if key else value
    return Times.model_validate(found)


def run(work, made, *, replicas=1, ranks=1, workers=None, steps=STEPS, first=0):
    flow = work.config.workflow
    allocation = Allocation(replicas, ranks, workers or {})
    lengths = made.lengths.draw(steps * flow.groups_per_step, flow.group_size, seed=0)
    return simulate(work, allocation, made, lengths, first=first), allocation, lengths


seconds = st.sampled_from([0.0, 0.01, 0.1, 0.5, 2.0])
drawn_lengths = st.lists(
    st.lists(st.integers(1, 30), min_size=SIZE, max_size=SIZE), min_size=1, max_size=8
)
drawn_times = st.builds(
    lambda lengths, **parts: Times(
        lengths={"groups": lengths},
        rollout={"token_s": parts["token"], "token_row_s": parts["beside"], "row_s": parts["row"]},
        stages={
            "reward": {"call_s": parts["call"], "row_s": parts["reward"]},
            "advantage": {"token_s": parts["advantage"]},
        },
        trainer={"token_s": parts["train"], "update_s": parts["update"], "step_s": parts["step"]},
        weights={"export_s": parts["export"], "stage_s": parts["stage"], "commit_s": parts["on"]},
    ),
    lengths=drawn_lengths,
    token=st.sampled_from([0.01, 0.1, 0.5]),
    beside=st.sampled_from([0.0, 0.01, 0.1]),
    row=seconds,
    call=seconds,
    reward=seconds,
    advantage=seconds,
    train=seconds,
    update=seconds,
    step=seconds,
    export=seconds,
    stage=seconds,
    on=seconds,
)


@pytest.mark.parametrize(("name", "bound"), PRESETS)
@given(made=drawn_times, replicas=st.integers(1, 3), ranks=st.sampled_from([1, 2]))
@settings(max_examples=25, deadline=None)
def test_run_is_never_below_its_bounds_and_never_staler_than_allowed(
    name, bound, made, replicas, ranks
):
    work = preset(name, bound)
    done, allocation, lengths = run(work, made, replicas=replicas, ranks=ranks)
    bounds = lower_bounds(work, allocation, made, lengths)
    allowed = work.config.workflow.bound
    total = done.step_ends[-1]
    # Weights after the last step come too late to count, in either of these.
    weights_s = sum(made.weights.model_dump().values())
    for what, bound_s in bounds.items():
        # A way that spans several steps is gone along once in as many.
        spans = allowed + 1 if what == "longest" else 1
        least = bound_s * (STEPS // spans * spans) - weights_s
        if what == "longest":
            longest = [max(map(max, lengths[at : at + GROUPS])) for at in range(0, 40, GROUPS)]
            least -= (max(longest) - min(longest)) * made.rollout.step_s(1) * (STEPS // spans)
        assert total >= least - 1e-6 * (1 + total), what
    assert done.staleness_max <= allowed
    assert all(a <= b for a, b in zip(done.step_ends, done.step_ends[1:], strict=False))
    assert all(0 <= share <= 1 + 1e-9 for share in done.busy.values())


@pytest.mark.parametrize(("name", "bound"), PRESETS)
@given(
    length=st.integers(1, 20),
    token=st.sampled_from([0.1, 0.5, 2.0]),
    beside=st.sampled_from([0.0, 0.2]),
    reward=seconds,
    train=seconds,
)
@settings(max_examples=12, deadline=None)
def test_more_replicas_are_never_slower_where_all_responses_are_alike(
    name, bound, length, token, beside, reward, train
):
    made = times(
        [[length, length]],
        rollout={"token_s": token, "token_row_s": beside},
        stages={"reward": {"row_s": reward}, "advantage": {"row_s": 0.0}},
        trainer={"token_s": train, "update_s": 0.1},
    )
    before = float("inf")
    for replicas in (1, 2, 4):
        done, _, _ = run(preset(name, bound, pacing=False), made, replicas=replicas)
        assert done.step_ends[-1] <= before * (1 + 1e-9)
        before = done.step_ends[-1]


def test_sequential_is_the_sum_of_its_parts():
    lengths = [[3, 5], [2, 2], [4, 4], [1, 7]]
    made = times(lengths, weights={"export_s": 1.0, "stage_s": 2.0, "commit_s": 4.0})
    done, _, _ = run(preset("sequential"), made, replicas=2)
    # Rows go to replicas by their keys, four at once: (0, 0), (1, 1), (2, 0), (3, 1) and the rest.
    rollout, reward, advantage = max(3, 2, 4, 7, 5, 2, 4, 1), 8 * 0.5, 8 * 0.25
    trainer = 28 * 0.5 + 0.25
    between = max(1.0, 2.0) + 4.0  # this transport stages beside the export
    ends = [
        (step + 1) * (rollout + reward + advantage + trainer) + step * between
        for step in range(STEPS)
    ]
    assert done.step_ends == pytest.approx(ends)
    assert done.staleness_max == 0


def test_streaming_by_hand():
    work = workload(
        "streaming",
        **{
            "workflow.groups_per_step": 2,
            "stages.reward.rows": 1,
            "trainer.micro_batch_tokens": 1,
        },
    )
    made = times([[1, 3], [2, 4]], trainer={"token_s": 0.1, "update_s": 0.2})
    done, _, _ = run(work, made)
    # Ended at 1, 3 and 2, 4; rewarded half a second later; group 0 has advantages at 3.5 + 0.5 and
    # is trained from 4.0 to 4.4, group 1 has them at 4.5 + 0.5, is trained to 5.6; the update: 5.8.
    assert done.step_ends == pytest.approx([5.8 * (step + 1) for step in range(STEPS)])
    assert done.waits == pytest.approx((4.0 + 0.6) / 5.8)
    assert done.busy["reward"] == pytest.approx(2.0 / 5.8)


def test_async_where_the_trainer_is_slowest_takes_its_work_alone():
    made = times([[3, 5], [2, 2], [4, 4], [1, 7]], trainer={"token_s": 1.0, "update_s": 0.5})
    for bound in (1, 2, 4):
        done, _, _ = run(preset("async", bound), made, steps=30, first=15)
        # Pacing tries now and then how late rows may come.
        assert 28.5 <= done.step_s <= 1.002 * 28.5
        assert done.bottleneck.what == "trainer"
        assert 1 <= done.staleness_max <= bound


def test_async_where_rollout_is_slowest_fills_every_slot():
    made = times([[10, 10]], trainer={"token_s": 0.01})
    done, allocation, lengths = run(preset("async", 4), made, steps=40, first=20)
    assert done.step_s == pytest.approx(8 * 10 / 4)
    assert done.step_s == pytest.approx(lower_bound(preset("async", 4), allocation, made, lengths))
    assert done.bottleneck.what == "rollout"


def test_speed_of_sequences_falls_with_those_beside_them():
    work = workload("streaming", **{"workflow.groups_per_step": 1})
    made = times(
        [[2, 4]],
        rollout={"token_s": 1.0, "token_row_s": 0.5, "row_s": 0.25},
        stages={"reward": {}, "advantage": {}},
        trainer={"token_s": 0.0},
    )
    done, _, _ = run(work, made)
    # Two run side by side for 2 tokens of 2 s, one goes on for 2 tokens of 1.5 s, then 0.25.
    assert done.step_ends[0] == pytest.approx(2 * 2.0 + 2 * 1.5 + 0.25)


@given(made=drawn_times)
@settings(max_examples=25, deadline=None)
def test_streaming_is_not_slower_than_sequential(made):
    # Calls are dearer the more there are; and one replica, for sequential shares rows out by key.
    stages = {"reward": {"row_s": made.stages["reward"].row_s}, "advantage": {"token_s": 0.01}}
    made = Times.model_validate({**made.model_dump(), "stages": stages})
    streaming, _, _ = run(preset("streaming"), made)
    sequential, _, _ = run(preset("sequential"), made)
    assert streaming.step_ends[-1] <= sequential.step_ends[-1] * (1 + 1e-9)


def test_drain_waits_for_running_responses_and_in_flight_does_not():
    # The third step needs rows of version 1, and one of the second batch runs long.
    made = times([[1, 1], [1, 1], [1, 1], [1, 9]], weights={"commit_s": 0.5})
    drained, _, _ = run(preset("delayed"), made, replicas=2)
    flight, _, _ = run(preset("async", 1), made, replicas=2)
    assert flight.step_ends[-1] < drained.step_ends[-1]


def test_same_seed_gives_the_same_run_and_another_gives_another():
    lengths = Lengths(mean=8.0, sigma=1.0, longest=40)
    one, two, other = (lengths.draw(6, 3, seed=seed) for seed in (5, 5, 6))
    assert one == two != other
    assert max(map(max, one)) <= 40


@pytest.mark.parametrize(
    "changes", [{"workflow.order": "ready_first"}, {"workflow.extra_groups": 2}]
)
def test_policies_that_are_not_simulated_are_refused(changes):
    with pytest.raises(ConfigError, match="plan with workflow"):
        workload(**changes)
