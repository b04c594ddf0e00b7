"""The losses against an independent numpy computation, with its gradients written out by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_algorithms.losses import ppo_clip, tis
from asyncflow_algorithms.options import PpoClipOptions, TisOptions
from asyncflow_core.batch import Batch, Column
from asyncflow_core.services.trainer import loss_columns

READS = ("behaviour_logprobs", "advantages", "proximal_logprobs", "ref_logprobs", "entropy")


def make_batch(seed, rows=5, *, gap=0.6, mask_share=0.3):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, rows)
    current = [-rng.exponential(1.0, n) for n in lengths]

    def near(scale):
        return Column.ragged([c + rng.normal(0, scale, len(c)) for c in current], np.float32)

    batch = Batch(
        {
            "response_ids": Column.ragged([np.zeros(n) for n in lengths], np.int32),
            "loss_mask": Column.ragged([rng.random(n) > mask_share for n in lengths], np.uint8),
            "behaviour_logprobs": near(gap),
            "proximal_logprobs": near(gap / 2),
            "ref_logprobs": near(gap),
            "advantages": Column.ragged(
                [np.full(n, a) for n, a in zip(lengths, rng.normal(0, 1, rows), strict=True)],
                np.float32,
            ),
            "entropy": Column.ragged([rng.random(n) for n in lengths], np.float32),
            "current": Column.ragged(current, np.float64),
        }
    )
    return batch


def call(loss, batch, config, *, columns=None, logprobs=None):
    made = loss_columns(batch, READS) if columns is None else columns
    tensors = {name: torch.as_tensor(value) for name, value in made.items()}
    values = batch["current"].array if logprobs is None else logprobs
    x = torch.tensor(np.asarray(values, np.float32), requires_grad=True)
    out = loss(x, tensors, config)
    (grad,) = torch.autograd.grad(out.sum, x)
    return out, grad.numpy()


def scale_of(batch, config):
    """What the aggregation multiplies each token by, and the weight."""
    mask = batch["loss_mask"].array.astype(float)
    per_row = np.array([m.sum() for m in batch["loss_mask"]])
    sequences = float((per_row > 0).sum())
    row = np.repeat(np.arange(batch.rows), batch["response_ids"].lengths)
    if config.aggregate == "token":
        return mask, mask.sum()
    if config.aggregate == "sequence":
        return mask / np.maximum(per_row, 1)[row], sequences
    return mask / config.max_tokens, sequences


def numpy_extras(batch, config, x):
    k3_d = batch["ref_logprobs"].array.astype(float) - x
    value = (
        config.kl_coef * (np.exp(k3_d) - 1 - k3_d) - config.entropy_coef * batch["entropy"].array
    )
    return value, config.kl_coef * (1 - np.exp(k3_d))


def numpy_ppo(batch, config, x):
    a = batch["advantages"].array.astype(float)
    behaviour = batch["behaviour_logprobs"].array.astype(float)
    old, w = behaviour, np.ones_like(a)
    if config.ratio_to == "proximal":
        old = batch["proximal_logprobs"].array.astype(float)
        w = np.minimum(np.exp(old - behaviour), config.behaviour_cap)
    ratio = np.exp(x - old)
    value, grad = np.empty_like(x), np.empty_like(x)
    for t in range(len(x)):
        clipped = (a[t] > 0 and ratio[t] > 1 + config.clip_high) or (
            a[t] < 0 and ratio[t] < 1 - config.clip_low
        )
        edge = 1 + config.clip_high if a[t] > 0 else 1 - config.clip_low
        value[t] = -a[t] * (edge if clipped else ratio[t])
        grad[t] = 0.0 if clipped else -a[t] * ratio[t]
        if config.dual_clip and a[t] < 0 and ratio[t] > config.dual_clip:
            value[t], grad[t] = -config.dual_clip * a[t], 0.0
    extra, extra_grad = numpy_extras(batch, config, x)
    scale, weight = scale_of(batch, config)
    return ((w * value + extra) * scale).sum(), (w * grad + extra_grad) * scale, weight


def numpy_tis(batch, config, x, at=None):
    at = x if at is None else at  # where the weights are taken: they are constants to the gradient
    a = batch["advantages"].array.astype(float)
    log_ratio = at - batch["behaviour_logprobs"].array.astype(float)
    if config.level == "sequence":
        row = np.repeat(np.arange(batch.rows), batch["response_ids"].lengths)
        sums = np.bincount(row, log_ratio * batch["loss_mask"].array, minlength=batch.rows)
        log_ratio = sums[row]
    w = np.minimum(np.exp(log_ratio), config.cap)
    extra, extra_grad = numpy_extras(batch, config, x)
    scale, weight = scale_of(batch, config)
    value = ((-w * a * np.exp(x - at) + extra) * scale).sum()
    return value, (-w * a * np.exp(x - at) + extra_grad) * scale, weight


PPO_CONFIGS = [
    PpoClipOptions(),
    PpoClipOptions(clip_high=0.28, aggregate="sequence"),
    PpoClipOptions(dual_clip=1.3, aggregate="dr_grpo", max_tokens=32),
    PpoClipOptions(ratio_to="proximal", behaviour_cap=1.2, kl_coef=0.05),
    PpoClipOptions(ratio_to="proximal", entropy_coef=0.01, aggregate="sequence", dual_clip=3.0),
]
TIS_CONFIGS = [
    TisOptions(),
    TisOptions(cap=1.1, aggregate="sequence", kl_coef=0.1),
    TisOptions(level="sequence", aggregate="dr_grpo", max_tokens=7, entropy_coef=0.02),
    TisOptions(level="sequence"),
]
CASES = [(ppo_clip, numpy_ppo, c) for c in PPO_CONFIGS] + [(tis, numpy_tis, c) for c in TIS_CONFIGS]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("loss", "reference", "config"), CASES)
def test_loss_random_batch_equals_numpy_value_and_gradient(loss, reference, config, seed):
    batch = make_batch(seed)
    out, grad = call(loss, batch, config)
    value, expected, weight = reference(batch, config, batch["current"].array)
    assert float(out.sum.detach()) == pytest.approx(value, rel=2e-5, abs=2e-5)
    assert out.weight == weight
    np.testing.assert_allclose(grad, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("loss", "reference", "config"), CASES)
def test_numpy_gradient_finite_differences_agree(loss, reference, config):
    batch = make_batch(11)
    x, h = batch["current"].array.copy(), 1e-6
    at = {} if reference is numpy_ppo else {"at": x.copy()}
    _, grad, _ = reference(batch, config, x, **at)
    for t in range(len(x)):
        up, down = x.copy(), x.copy()
        up[t] += h
        down[t] -= h
        slope = (
            reference(batch, config, up, **at)[0] - reference(batch, config, down, **at)[0]
        ) / (2 * h)
        assert slope == pytest.approx(grad[t], rel=1e-4, abs=1e-6)


def golden_columns(**changes):
    columns = {
        "row": np.array([0, 0, 1]),
        "loss_mask": np.array([1, 1, 1], np.uint8),
        "behaviour_logprobs": np.log(np.array([0.5, 0.5, 0.5], np.float32)),
        "advantages": np.array([1.0, 1.0, -1.0], np.float32),
    }
    return {**columns, **changes}


def test_ppo_clip_by_hand_golden_numbers():
    # ratios 1.5, 0.9, 0.6; advantages 1, 1, -1: gains 1.2 (clipped), 0.9, -0.8 (clipped).
    x = np.log([0.75, 0.45, 0.3])
    out, grad = call(ppo_clip, None, PpoClipOptions(), columns=golden_columns(), logprobs=x)
    assert float(out.sum.detach()) == pytest.approx(-(1.2 + 0.9 - 0.8), rel=1e-6)
    assert out.weight == 3
    np.testing.assert_allclose(grad, [0.0, -0.9, 0.0], rtol=1e-6)
    assert out.metrics["loss/ratio"] == (pytest.approx(3.0), 3)
    assert out.metrics["loss/clip_fraction"] == (2, 3)
    k1 = -math.log(1.5) - math.log(0.9) - math.log(0.6)
    assert out.metrics["loss/kl_behaviour_k1"][0] == pytest.approx(k1, rel=1e-5)
    assert out.metrics["loss/kl_behaviour_k3"][0] == pytest.approx(0.0 + k1, rel=1e-5)


def test_tis_by_hand_golden_numbers():
    # Ratios 2.4, 0.9, 0.6 with the cap 2; the sequence's product is 2.16, so 2 again.
    x = np.log([1.2, 0.45, 0.3])
    out, grad = call(tis, None, TisOptions(), columns=golden_columns(), logprobs=x)
    np.testing.assert_allclose(grad, [-2.0, -0.9, 0.6], rtol=1e-6)
    assert out.metrics["loss/capped_fraction"] == (1, 3)
    _, grad = call(tis, None, TisOptions(level="sequence"), columns=golden_columns(), logprobs=x)
    np.testing.assert_allclose(grad, [-2.0, -2.0, 0.6], rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_equal_policies_ratio_is_one_and_gradient_minus_advantage(seed):
    batch = make_batch(seed, mask_share=0.0)
    same = Column(batch["behaviour_logprobs"].array, batch["response_ids"].offsets)
    batch = batch.with_columns({"current": same, "proximal_logprobs": same})
    for loss, config in [
        (ppo_clip, PpoClipOptions()),
        (ppo_clip, PpoClipOptions(ratio_to="proximal")),
        (tis, TisOptions()),
        (tis, TisOptions(level="sequence")),
    ]:
        out, grad = call(loss, batch, config)
        total, weight = out.metrics["loss/ratio"]
        assert total == weight == out.weight
        np.testing.assert_array_equal(grad, -batch["advantages"].array)
        assert out.metrics["loss/kl_behaviour_k3"][0] == 0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), advantage=st.sampled_from([-1.5, 2.0]), step=st.floats(0.3, 3))
def test_clipped_tokens_gradient_zero_on_the_right_side_only(seed, advantage, step):
    batch = make_batch(seed, mask_share=0.0)
    n = len(batch["advantages"].array)
    behaviour = batch["behaviour_logprobs"].array.astype(np.float64)
    fixed = {"advantages": Column(np.full(n, advantage, np.float32), batch["response_ids"].offsets)}
    batch = batch.with_columns(fixed)
    away, back = behaviour + np.sign(advantage) * step, behaviour - np.sign(advantage) * step
    _, grad = call(ppo_clip, batch, PpoClipOptions(), logprobs=away)
    np.testing.assert_array_equal(grad, 0)
    _, grad = call(ppo_clip, batch, PpoClipOptions(), logprobs=back)
    assert (np.sign(grad) == -np.sign(advantage)).all()


@pytest.mark.parametrize(("loss", "config"), [(c[0], c[2]) for c in CASES])
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan, -1e30])
def test_masked_tokens_whatever_they_hold_contribute_nothing(loss, config, poison):
    batch = make_batch(3)
    masked = batch["loss_mask"].array == 0
    assert masked.any()
    columns = loss_columns(batch, READS)
    clean, grad = call(loss, batch, config)
    dirty_columns = {
        name: np.where(masked, np.float32(poison), value) if name in READS else value
        for name, value in columns.items()
    }
    x = np.where(masked, poison, batch["current"].array)
    dirty, dirty_grad = call(loss, batch, config, columns=dirty_columns, logprobs=x)
    assert dirty.sum.item() == clean.sum.item()
    assert dirty.metrics == clean.metrics
    np.testing.assert_array_equal(dirty_grad, grad)
    np.testing.assert_array_equal(dirty_grad[masked], 0)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), parts=st.integers(1, 4), case=st.sampled_from(CASES))
def test_micro_batches_sums_weights_metrics_add_up(seed, parts, case):
    loss, _, config = case
    batch = make_batch(seed, rows=7)
    whole, whole_grad = call(loss, batch, config)
    order = np.random.default_rng(seed).permutation(batch.rows)
    total, weight, pairs, grads = 0.0, 0.0, {}, {}
    for rows in np.array_split(order, parts):
        part = batch.take(rows)
        out, grad = call(loss, part, config)
        total, weight = total + float(out.sum.detach()), weight + out.weight
        for name, (s, w) in out.metrics.items():
            old = pairs.get(name, (0.0, 0.0))
            pairs[name] = (old[0] + s, old[1] + w)
        for row, values in zip(rows, Column(grad, part["response_ids"].offsets), strict=True):
            grads[int(row)] = values
    assert total == pytest.approx(float(whole.sum.detach()), rel=1e-4, abs=1e-4)
    assert weight == whole.weight
    assert pairs.keys() == whole.metrics.keys()
    for name, (s, w) in whole.metrics.items():
        assert pairs[name] == (pytest.approx(s, rel=1e-4, abs=1e-4), w)
    joined = np.concatenate([grads[row] for row in range(batch.rows)])
    np.testing.assert_allclose(joined, whole_grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("aggregate", [{}, {"aggregate": "dr_grpo", "max_tokens": 9}])
@pytest.mark.parametrize("column", [True, False])
def test_decoupled_one_update_equals_tis(aggregate, column):
    batch = make_batch(5, gap=1.0)
    now = Column(batch["current"].array.astype(np.float32), batch["response_ids"].offsets)
    columns = loss_columns(batch.with_columns({"proximal_logprobs": now}), READS)
    if not column:
        del columns["proximal_logprobs"]
    options = PpoClipOptions(ratio_to="proximal", behaviour_cap=2.0, **aggregate)
    decoupled, grad = call(ppo_clip, batch, options, columns=columns)
    truncated, expected = call(tis, batch, TisOptions(cap=2.0, **aggregate), columns=columns)
    np.testing.assert_allclose(grad, expected, rtol=1e-6)
    assert float(decoupled.sum.detach()) == pytest.approx(float(truncated.sum.detach()), rel=1e-6)
    assert decoupled.weight == truncated.weight


@pytest.mark.parametrize(("loss", "config"), [(c[0], c[2]) for c in CASES])
def test_no_trained_token_weight_zero_gradient_zero(loss, config):
    batch = make_batch(2)
    zeros = Column(np.zeros_like(batch["loss_mask"].array), batch["response_ids"].offsets)
    out, grad = call(loss, batch.with_columns({"loss_mask": zeros}), config)
    assert (out.sum.item(), out.weight) == (0.0, 0.0)
    np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize(("loss", "config"), [(ppo_clip, PpoClipOptions()), (tis, TisOptions())])
def test_huge_log_ratio_value_and_gradient_stay_finite(loss, config):
    columns = golden_columns(behaviour_logprobs=np.array([-500, -1, -500], np.float32))
    out, grad = call(loss, None, config, columns=columns, logprobs=np.array([-0.1, -400, -0.1]))
    assert np.isfinite(out.sum.item())
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("loss", [ppo_clip, tis])
@pytest.mark.parametrize("gap", [1.0, 19.0, 21.0, 60.0, 200.0])
def test_kl_pulls_back_what_the_reference_hardly_knows(loss, gap):
    # k3 of d = reference - current is exp(d) - 1 - d, and 1 - exp(d) its gradient.
    options = PpoClipOptions if loss is ppo_clip else TisOptions
    columns = {
        "loss_mask": np.ones(1, np.uint8),
        "row": np.zeros(1, np.int64),
        "behaviour_logprobs": np.float32([-0.5]),
        "advantages": np.float32([0.0]),
        "ref_logprobs": np.float32([-0.5 - gap]),
    }
    config = options(kl_coef=0.1)
    out, grad = call(loss, None, config, columns=columns, logprobs=[-0.5])
    assert float(out.sum.detach()) == pytest.approx(0.1 * (math.exp(-gap) - 1 + gap), rel=1e-5)
    assert grad[0] == pytest.approx(0.1 * (1 - math.exp(-gap)), rel=1e-5)


def test_entropy_column_with_gradient_gets_it():
    columns = {n: torch.as_tensor(v) for n, v in golden_columns().items()}
    columns["entropy"] = torch.ones(3, requires_grad=True)
    out = ppo_clip(torch.full((3,), -0.7), columns, PpoClipOptions(entropy_coef=0.5))
    (grad,) = torch.autograd.grad(out.sum, columns["entropy"])
    np.testing.assert_allclose(grad, -0.5)
    assert out.metrics["loss/entropy"] == (3, 3)
