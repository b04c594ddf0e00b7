"""Costs found again from sums of what they made."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_core.batch import Key
from asyncflow_core.flow.simulation import fitting
from asyncflow_core.flow.working.costs import Costs, Running, Serial

KEYS = [Key(0, 0, 0, sample) for sample in range(4)]


def observed(truth, *, noise=0.0, seed=0, count=200):
    rng, costs = np.random.default_rng(seed), Costs()
    for _ in range(count):
        second, third = rng.integers(1, 50), rng.integers(1, 900)
        seconds = truth[0] + truth[1] * second + truth[2] * third
        costs.add(seconds * (1 + noise * rng.standard_normal()), float(second), float(third))
    return costs.sums


@given(st.tuples(*[st.sampled_from([0.0, 0.01, 0.5, 3.0])] * 3))
@settings(max_examples=40, deadline=None)
def test_fit_finds_what_made_the_times(truth):
    assert fitting.fit(observed(truth)) == pytest.approx(truth, rel=1e-6, abs=1e-6)


@given(st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_fit_of_noisy_times_is_near_and_never_negative(seed):
    found = fitting.fit(observed((0.0, 0.5, 0.002), noise=0.1, seed=seed))
    assert min(found) >= 0
    total = found[0] + found[1] * 25 + found[2] * 450
    assert total == pytest.approx(0.5 * 25 + 0.002 * 450, rel=0.05)


def test_fit_agrees_with_plain_least_squares():
    rng = np.random.default_rng(3)
    causes = np.column_stack([np.ones(50), rng.integers(1, 9, 50), rng.integers(1, 99, 50)])
    seconds = causes @ [2.0, 0.7, 0.05] + 0.01 * rng.standard_normal(50)
    costs = Costs()
    for row, took in zip(causes, seconds, strict=True):
        costs.add(took, row[1], row[2])
    direct, *_ = np.linalg.lstsq(causes, seconds, rcond=None)
    assert fitting.fit(costs.sums) == pytest.approx(tuple(direct), rel=1e-6)


def test_fit_of_causes_that_grow_together_takes_the_first_for_all():
    costs = Costs()
    for tokens in (8.0, 8.0, 8.0):
        costs.add(4.0, tokens, 0.0)
    assert fitting.fit(costs.sums, (1, 0)) == pytest.approx((0.0, 0.5, 0.0))
    assert fitting.fit(costs.sums, (0, 1)) == pytest.approx((4.0, 0.0, 0.0))


def test_sums_of_two_are_the_sums_of_both():
    both, one, two = Costs(), Costs(), Costs()
    for part, seconds in itertools.product((one, two), (1.0, 2.0)):
        part.add(seconds, 3.0, seconds)
        both.add(seconds, 3.0, seconds)
    assert fitting.add(fitting.add((), one.sums), two.sums) == pytest.approx(both.sums)
    assert fitting.count(both.sums) == 4
    assert fitting.mean(both.sums, 3) == 1.5


def test_serial_calls_take_from_the_end_of_the_one_before():
    costs = Costs()
    serial = Serial(costs)
    serial.call(10.0, 12.0, rows=2, tokens=7)
    serial.call(11.0, 15.0, rows=2, tokens=7)  # it waited until 12
    serial.call(20.0, 21.0, rows=2, tokens=7)
    assert fitting.mean(costs.sums, 3) == pytest.approx((2.0 + 3.0 + 1.0) / 3)
    assert fitting.mean(costs.sums, 1) == 2


def test_running_responses_count_those_beside_them():
    costs = Costs()
    running = Running(costs)
    running.begin(KEYS[:2], 100.0)
    running.end(KEYS[0], 104.0, tokens=4)  # two ran all the time
    running.stop([KEYS[2]], 104.0)  # it never began
    running.end(KEYS[3], 104.0, tokens=9)
    running.end(KEYS[1], 106.0, tokens=6)  # 4 s beside another, 2 s alone: 10 / 6 on the mean
    assert fitting.count(costs.sums) == 2
    beside = (4 * 2.0 + 6 * (10 / 6)) / 2
    assert fitting.mean(costs.sums, 2) == pytest.approx(beside)
    assert fitting.mean(costs.sums, 3) == pytest.approx(5.0)
