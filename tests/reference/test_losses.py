import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_core import metrics
from asyncflow_core.batch import Batch, Column
from asyncflow_core.errors import DataError
from asyncflow_core.reference.losses import TabularPPOClipOptions, tabular_ppo_clip
from asyncflow_core.services.trainer import loss_columns

from .conftest import make_batch

READS = ("behaviour_logprobs", "advantages")


def run(logprobs, columns, **options):
    return tabular_ppo_clip(logprobs, columns, TabularPPOClipOptions(**options))


@given(st.integers(0, 10_000), st.sampled_from(["token", "sequence"]))
@settings(deadline=None, max_examples=50)
def test_ppo_clip_gradient_equals_finite_differences(seed, normalise):
    columns = loss_columns(make_batch(seed=seed), READS)
    rng = np.random.default_rng(seed)
    logprobs = columns["behaviour_logprobs"] + rng.normal(0, 0.4, len(columns["row"]))
    ratio = np.exp(logprobs - columns["behaviour_logprobs"])
    # Finite differences across a kink mean nothing.
    logprobs += 1e-3 * ((np.abs(ratio - 1.2) < 1e-4) | (np.abs(ratio - 0.7) < 1e-4))
    options = {"clip_low": 0.3, "clip_high": 0.2, "normalise": normalise}
    grad = run(logprobs, columns, **options).grad
    for token in range(len(logprobs)):
        step = np.zeros_like(logprobs)
        step[token] = 1e-6
        up, down = (
            run(logprobs + step, columns, **options),
            run(logprobs - step, columns, **options),
        )
        assert grad[token] == pytest.approx((up.sum - down.sum) / 2e-6, abs=1e-6)


def test_ppo_clip_on_policy_is_the_policy_gradient():
    columns = loss_columns(make_batch(), READS)
    output = run(columns["behaviour_logprobs"].astype(float), columns)
    mask = columns["loss_mask"].astype(float)
    np.testing.assert_allclose(output.grad, -mask * columns["advantages"])
    assert output.weight == mask.sum()
    assert output.metrics[metrics.TRAINER_CLIP_SHARE] == (0.0, mask.sum())
    assert output.metrics[metrics.TRAINER_BEHAVIOUR_KL][0] == pytest.approx(0.0)


def test_ppo_clip_by_sequence_each_trained_row_counts_once():
    batch = make_batch(masked=1.0)
    columns = loss_columns(batch, READS)
    output = run(columns["behaviour_logprobs"].astype(float), columns, normalise="sequence")
    filled = batch["response_ids"].lengths > 0
    advantages = [row[0] for row in batch["advantages"] if len(row)]
    assert output.weight == filled.sum()
    assert output.sum == pytest.approx(-sum(advantages), rel=1e-5)


def test_ppo_clip_masked_tokens_add_nothing_whatever_their_log_probs():
    columns = loss_columns(make_batch(), READS)
    masked = columns["loss_mask"] == 0
    assert masked.any()
    logprobs = columns["behaviour_logprobs"].astype(float)
    expected = run(logprobs, columns)
    behaviour = np.where(masked, np.float32(-1e4), columns["behaviour_logprobs"])
    found = run(logprobs, {**columns, "behaviour_logprobs": behaviour})
    assert found.sum == expected.sum
    assert found.metrics == expected.metrics
    np.testing.assert_array_equal(found.grad, expected.grad)


def test_loss_columns_flattens_tokens_versions_and_rows():
    batch = (
        make_batch(3)
        .take([0, 1])
        .with_columns(
            {
                "response_ids": Column.ragged([[1, 2, 3], [4]], np.int32),
                "loss_mask": Column.ragged([[1, 0, 1], [1]], np.uint8),
                "versions": Column.ragged([[[4, 2], [5, 1]], [[5, 1]]], np.int32),
                "reward": Column.dense([0.5, 1.0], np.float32),
            }
        )
    )
    columns = loss_columns(batch, ["versions", "reward"])
    assert {name: array.tolist() for name, array in columns.items()} == {
        "row": [0, 0, 0, 1],
        "loss_mask": [1, 0, 1, 1],
        "versions": [4, 4, 5, 5],
        "reward": [0.5, 1.0],
    }


def test_loss_columns_missing_object_or_short_refused():
    batch = make_batch(3)
    with pytest.raises(DataError, match="'ref_logprobs'"):
        loss_columns(batch, ["ref_logprobs"])
    with pytest.raises(DataError, match="objects"):
        loss_columns(batch, ["sampling"])
    with pytest.raises(DataError, match="covers"):
        loss_columns(batch, ["prompt_ids"])
    with pytest.raises(DataError, match="'response_ids'"):
        loss_columns(Batch({}))
