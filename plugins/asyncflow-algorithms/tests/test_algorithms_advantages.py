import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_algorithms.advantages import group_advantages, grpo_stage
from asyncflow_algorithms.options import GrpoOptions
from asyncflow_core.batch import Batch, Column
from asyncflow_core.parts import KEY_COLUMN


def stage_batch(rewards, groups, lengths):
    keys = np.array([[0, 0, g, i] for i, g in enumerate(groups)], np.int64).reshape(-1, 4)
    return Batch(
        {
            KEY_COLUMN: Column.dense(keys),
            "reward": Column.dense(rewards, np.float32),
            "response_ids": Column.ragged([np.zeros(n) for n in lengths], np.int32),
        }
    )


def test_grpo_two_interleaved_groups_golden():
    batch = stage_batch([1, 5, 0, 9, 1, 7], [3, 8, 3, 8, 3, 8], [2, 1, 0, 1, 1, 2])
    column = grpo_stage(GrpoOptions())(batch)["advantages"]
    assert column.array.dtype == np.float32
    np.testing.assert_array_equal(column.lengths, [2, 1, 0, 1, 1, 2])
    # group 3: 1, 0, 1 with deviation sqrt(1/3); group 8: 5, 9, 7 with deviation 2.
    high = (1 / 3) / (np.sqrt(1 / 3) + 1e-6)
    np.testing.assert_allclose(column.array, [high, high, -1, 1, high, 0, 0], rtol=1e-5)


def test_grpo_without_std_is_dr_grpo():
    batch = stage_batch([1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1])
    column = grpo_stage(GrpoOptions(normalise_std=False))(batch)["advantages"]
    np.testing.assert_array_equal(column.array, [0.5, -0.5, -0.5, 0.5])


@settings(max_examples=50, deadline=None)
@given(
    reward=st.floats(-1e6, 1e6, width=32),
    size=st.integers(1, 33),
    normalise=st.booleans(),
)
def test_grpo_equal_rewards_exactly_zero(reward, size, normalise):
    out = group_advantages(
        np.full(size, reward, np.float32), np.zeros(size, int), normalise_std=normalise, eps=1e-12
    )
    assert (out == 0).all()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), groups=st.integers(1, 6))
def test_grpo_any_groups_mean_zero_and_order_free(seed, groups):
    rng = np.random.default_rng(seed)
    of = rng.integers(0, groups, 40)
    _, of = np.unique(of, return_inverse=True)
    rewards = rng.normal(size=40).astype(np.float32)
    out = group_advantages(rewards, of, normalise_std=True, eps=1e-6)
    for g in range(of.max() + 1):
        mine = out[of == g]
        assert abs(mine.sum()) < 1e-4
        if len(mine) > 1:
            assert mine.std(ddof=1) == pytest.approx(1, rel=1e-3)
    order = rng.permutation(40)
    shuffled = group_advantages(rewards[order], of[order], normalise_std=True, eps=1e-6)
    np.testing.assert_allclose(shuffled, out[order], rtol=1e-5, atol=1e-6)


def test_grpo_empty_batch_empty_column():
    batch = stage_batch([], [], [])
    assert len(grpo_stage(GrpoOptions())(batch)["advantages"]) == 0
