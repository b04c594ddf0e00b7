"""Policy losses on per-token log-probs, in torch.

Shape letters: T response tokens of a micro-batch one after another, N those with `loss_mask` 1,
S sequences with at least one of them. Only the N tokens are ever computed with, so what stands at
a masked token, be it infinite, cannot reach the loss or a gradient.

Sums and weights are additive over micro-batches and ranks as long as no sequence is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncflow_algorithms.options import LossOptions, PpoClipOptions, TisOptions
from asyncflow_core.services.trainer import LossOutput

__all__ = ["ppo_clip", "tis"]

# Log-ratios are held in [-20, 20] (as in verl, core_algos.py): exp overflows float32 at 88, and
# an infinite ratio in the branch that `minimum` drops still makes its gradient 0 * inf = nan.
_LOG_RATIO_MAX = 20.0


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The trained tokens of a micro-batch.

    Attributes:
        current: log-probs of the current weights, with gradient [N].
        columns: what was passed, the per-token columns cut to [N].
        sequence: which of the S sequences each token belongs to [N].
        lengths: trained tokens of each sequence [S].
    """

    current: Tensor
    columns: Mapping[str, Tensor]
    sequence: Tensor
    lengths: Tensor

    @property
    def count(self) -> int:
        return len(self.current)


def _trained(logprobs: Tensor, columns: Mapping[str, Tensor]) -> _Tokens:
    mask_T = columns["loss_mask"].bool()
    per_token = ("behaviour_logprobs", "proximal_logprobs", "ref_logprobs", "advantages", "entropy")
    cut = {name: columns[name][mask_T].float() for name in per_token if name in columns}
    _, sequence_N, lengths_S = torch.unique(
        columns["row"][mask_T], return_inverse=True, return_counts=True
    )
    return _Tokens(logprobs[mask_T].float(), cut, sequence_N, lengths_S)


def _log_ratio(of: Tensor, to: Tensor) -> Tensor:
    return torch.clamp(of - to, -_LOG_RATIO_MAX, _LOG_RATIO_MAX)


def _k3(log_ratio: Tensor) -> Tensor:
    """Of log(q / p) at samples of p: an unbiased, never negative estimate of KL(p || q).

    Source: J. Schulman, "Approximating KL divergence", 2020.
    """
    return torch.exp(log_ratio) - 1 - log_ratio


def _finish(
    loss_N: Tensor, tokens: _Tokens, metrics: dict[str, Tensor], config: LossOptions
) -> LossOutput:
    """Add the penalties, aggregate, and take all numbers off the device at once."""
    if config.kl_coef:
        # Held above only: below, k3 is nearly linear, and a token that the reference hardly knows
        # is the one that must be pulled back.
        ahead_N = tokens.columns["ref_logprobs"] - tokens.current
        kl_N = _k3(torch.clamp(ahead_N, max=_LOG_RATIO_MAX))
        loss_N = loss_N + config.kl_coef * kl_N
        metrics["loss/kl_reference"] = kl_N
    if config.entropy_coef:
        loss_N = loss_N - config.entropy_coef * tokens.columns["entropy"]
        metrics["loss/entropy"] = tokens.columns["entropy"]
    total, weight = _aggregate(loss_N, tokens, config)
    with torch.no_grad():
        behind_N = _log_ratio(tokens.current, tokens.columns["behaviour_logprobs"])
        metrics["loss/kl_behaviour_k1"] = -behind_N
        metrics["loss/kl_behaviour_k3"] = _k3(behind_N)
        sums = torch.stack([values.detach().float().sum() for values in metrics.values()]).tolist()
    pairs = {name: (value, float(tokens.count)) for name, value in zip(metrics, sums, strict=True)}
    return LossOutput(sum=total, weight=weight, metrics=pairs)


def _aggregate(loss_N: Tensor, tokens: _Tokens, config: LossOptions) -> tuple[Tensor, float]:
    sequences = float(len(tokens.lengths))
    if config.aggregate == "token":
        return loss_N.sum(), float(tokens.count)
    if config.aggregate == "sequence":
        return (loss_N / tokens.lengths[tokens.sequence]).sum(), sequences
    assert config.max_tokens is not None, "the options' validator wants it"
    return loss_N.sum() / config.max_tokens, sequences


def ppo_clip(logprobs: Tensor, columns: Mapping[str, Tensor], config: PpoClipOptions) -> LossOutput:
    """PPO's clipped surrogate, towards the sampling policy or decoupled from it.

    With `ratio_to: proximal` and no `proximal_logprobs` the proximal policy is the current one,
    which is what it is at a step's only update.

    Source: arXiv:1707.06347 eq. 7; dual clip arXiv:1912.09729; decoupled arXiv:2110.00641.
    """
    tokens = _trained(logprobs, columns)
    behaviour_N = tokens.columns["behaviour_logprobs"]
    advantages_N = tokens.columns["advantages"]
    metrics: dict[str, Tensor] = {}
    old_N = behaviour_N
    if config.ratio_to == "proximal":
        old_N = tokens.columns.get("proximal_logprobs", tokens.current).detach()
    ratio_N = torch.exp(_log_ratio(tokens.current, old_N))
    held_N = torch.clamp(ratio_N, 1 - config.clip_low, 1 + config.clip_high)
    gain_N = torch.minimum(ratio_N * advantages_N, held_N * advantages_N)
    clipped_N = torch.where(advantages_N > 0, ratio_N > held_N, ratio_N < held_N)
    metrics["loss/ratio"] = ratio_N
    metrics["loss/clip_fraction"] = clipped_N & (advantages_N != 0)
    if config.dual_clip is not None:
        bound_N = config.dual_clip * advantages_N
        bounded_N = (advantages_N < 0) & (gain_N < bound_N)
        gain_N = torch.where(bounded_N, bound_N, gain_N)
        metrics["loss/dual_clip_fraction"] = bounded_N
    if config.ratio_to == "proximal":
        weight_N = torch.exp(_log_ratio(old_N, behaviour_N))
        metrics["loss/behaviour_capped_fraction"] = weight_N > config.behaviour_cap
        weight_N = weight_N.clamp(max=config.behaviour_cap)
        metrics["loss/behaviour_weight"] = weight_N
        gain_N = weight_N * gain_N
    return _finish(-gain_N, tokens, metrics, config)


def tis(logprobs: Tensor, columns: Mapping[str, Tensor], config: TisOptions) -> LossOutput:
    """The policy gradient of current samples, from older ones by truncated importance weights.

    A token's gradient is -min(ratio, cap) * advantage * d logprob; its value is the same without
    the last factor, so that it compares with `ppo_clip`'s. There is no trust region: with several
    updates a step use `ppo_clip` with `ratio_to: proximal`.

    Source: arXiv:1802.01561 (truncation); FlashRL (language models).
    """
    tokens = _trained(logprobs, columns)
    frozen_N = tokens.current.detach()
    behind_N = frozen_N - tokens.columns["behaviour_logprobs"]
    if config.level == "sequence":
        behind_S = torch.zeros_like(tokens.lengths, dtype=behind_N.dtype)
        behind_N = behind_S.index_add(0, tokens.sequence, behind_N)[tokens.sequence]
    ratio_N = torch.exp(torch.clamp(behind_N, -_LOG_RATIO_MAX, _LOG_RATIO_MAX))
    weight_N = ratio_N.clamp(max=config.cap)
    # exp(x - x) is 1 and has the gradient of x.
    gain_N = weight_N * tokens.columns["advantages"] * torch.exp(tokens.current - frozen_N)
    metrics: dict[str, Tensor] = {
        "loss/ratio": ratio_N,
        "loss/weight": weight_N,
        "loss/capped_fraction": ratio_N > config.cap,
    }
    return _finish(-gain_N, tokens, metrics, config)
