"""Losses on numpy arrays, with their gradients written out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from asyncflow_core import metrics
from asyncflow_core.config import Section
from asyncflow_core.services.trainer import LossOutput

__all__ = ["TabularPPOClipOptions", "tabular_ppo_clip"]


class TabularPPOClipOptions(Section):
    """Options of `tabular_ppo_clip`."""

    clip_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """A ratio below 1 - clip_low is clipped."""
    clip_high: float = Field(default=0.2, ge=0.0)
    """A ratio above 1 + clip_high is clipped."""
    normalise: Literal["token", "sequence"] = "token"
    """What counts once: every trained token, or every sequence with a trained token."""


def tabular_ppo_clip(
    logprobs: NDArray[np.float64],
    columns: Mapping[str, NDArray[Any]],
    config: TabularPPOClipOptions,
) -> LossOutput:
    """PPO-clip with the ratio to the behaviour policy.

    Args:
        logprobs: [T], of the current weights.
        columns: `behaviour_logprobs`, `advantages`, `loss_mask`, `row`, each [T].
        config: the options.
    """
    mask = columns["loss_mask"].astype(np.float64)
    advantages = columns["advantages"].astype(np.float64)
    # Nothing is known of the log-probs of tokens that are not trained, and 0 x inf is no 0.
    log_ratio = np.where(mask > 0, logprobs - columns["behaviour_logprobs"], 0.0)
    ratio = np.exp(log_ratio)
    clipped = np.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    active = ratio * advantages <= clipped * advantages
    trained = np.bincount(columns["row"], mask)
    if config.normalise == "sequence":
        share, weight = mask / np.maximum(trained[columns["row"]], 1.0), float((trained > 0).sum())
    else:
        share, weight = mask, float(mask.sum())
    tokens = float(mask.sum())
    surrogate = np.minimum(ratio * advantages, clipped * advantages)
    return LossOutput(
        sum=-float((share * surrogate).sum()),
        weight=weight,
        metrics={
            metrics.TRAINER_CLIP_SHARE: (float((mask * ~active).sum()), tokens),
            # The estimator r - 1 - log r is never negative, unlike the plain mean of -log r.
            metrics.TRAINER_BEHAVIOUR_KL: (float((mask * (ratio - 1 - log_ratio)).sum()), tokens),
        },
        grad=-share * np.where(active, ratio * advantages, 0.0),
    )
