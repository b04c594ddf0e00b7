"""The fastest allocation under a budget, as trying all of them finds it."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_core.errors import ConfigError
from asyncflow_core.flow.simulation.search import Devices, Sample, search
from asyncflow_core.flow.simulation.simulator import simulate
from asyncflow_core.flow.simulation.times import Times
from asyncflow_core.flow.simulation.workload import Allocation

from .conftest import preset, workload


def times(token_s, train_s, reward_s=0.0):
    return Times.model_validate(
        {
            "lengths": {"mean": 12, "sigma": 0.5, "longest": 40},
            "rollout": {"token_s": token_s},
            "stages": {"reward": {"row_s": reward_s}, "advantage": {}},
            "trainer": {"token_s": train_s, "update_s": 0.1},
        }
    )


@given(
    token_s=st.sampled_from([0.05, 0.2, 1.0]),
    train_s=st.sampled_from([0.05, 0.2, 1.0]),
    reward_s=st.sampled_from([0.0, 1.0]),
    devices=st.integers(2, 5),
)
@settings(max_examples=6, deadline=None)
def test_search_finds_what_trying_all_finds(token_s, train_s, reward_s, devices):
    work, made = preset("async", 1), times(token_s, train_s, reward_s)
    sample = Sample.of(work, made, steps=12)
    ranks, workers = [1, 2, 4], {"reward": [1, 2]}
    found = search(work, made, sample, devices=devices, ranks=ranks, workers=workers)
    every = [
        Allocation(replicas, count, {"reward": n, "advantage": 1})
        for count, n in itertools.product(ranks, workers["reward"])
        for replicas in range(1, devices - count + 1)
    ]
    assert found.allocations == len(every)
    steps = {
        (at.replicas, at.ranks, at.workers["reward"]): simulate(
            work, at, made, sample.lengths, first=sample.first
        ).step_s
        for at in every
    }
    # Anomalies of list scheduling aside, nothing is faster; and nothing as fast is cheaper.
    assert found.best.simulated.step_s <= min(steps.values()) * 1.01
    fast = [key for key, step_s in steps.items() if step_s <= min(steps.values()) * 1.0001]
    assert found.best.devices <= min(replicas + count for replicas, count, _ in fast)


def test_search_of_a_slow_trainer_gives_it_the_devices():
    work = preset("async", 1)
    made = times(token_s=0.1, train_s=1.0)
    found = search(work, made, Sample.of(work, made), devices=8, ranks=[1, 2, 4], workers={})
    assert found.best.allocation.ranks == 4
    assert found.present.allocation == work.allocation
    assert found.present.simulated.step_s > 2 * found.best.simulated.step_s


def test_search_twice_is_the_same():
    work, made = preset("async", 1), times(0.2, 0.2)
    first, second = (
        search(work, made, Sample.of(work, made), devices=5, ranks=[1, 2], workers={})
        for _ in range(2)
    )
    assert first == second


def test_search_without_enough_devices_says_how_many_it_takes():
    work, made = preset("async", 1), times(0.2, 0.2)
    with pytest.raises(ConfigError, match=r"devices: 2 are too few.* take 5"):
        search(work, made, Sample.of(work, made), devices=2, ranks=[4], workers={})


def test_devices_are_shared_out_as_the_configuration_does():
    changes = {"rollout.replicas": 2, "rollout.devices": [0, 1, 2, 3], "trainer.devices": [4]}
    devices = Devices.of(workload(**changes))
    assert devices.replica == 2
    assert devices.taken(Allocation(3, 2, {"reward": 4, "advantage": 1})) == 8
