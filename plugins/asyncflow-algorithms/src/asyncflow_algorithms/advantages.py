"""Advantages from rewards, on numpy. Shape letters: B rows, T tokens, G groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncflow_algorithms.options import GrpoOptions
from asyncflow_core.batch import Batch, Column
from asyncflow_core.parts import Stage, group_index

__all__ = ["group_advantages", "grpo_stage"]


def group_advantages(
    rewards: NDArray[np.float32],
    groups: NDArray[np.int64],
    *,
    normalise_std: bool,
    eps: float,
) -> NDArray[np.float32]:
    """One advantage a row: its reward minus its group's mean, by the group's deviation if asked.

    The deviation has Bessel's correction, as in verl and TRL. Equal rewards, and so a group of
    one, give exactly 0: nothing can be learnt from them, and rounding must not be blown up by
    the division.

    Args:
        rewards: float [B].
        groups: group number of each row from 0 [B].
        normalise_std: divide by the deviation.
        eps: added to it.

    Returns:
        float32 [B].
    """
    rewards_B = np.asarray(rewards, np.float64)
    if not len(rewards_B):
        return np.zeros(0, np.float32)
    sizes_G = np.bincount(groups)
    means_G = np.bincount(groups, rewards_B) / np.maximum(sizes_G, 1)
    centred_B = rewards_B - means_G[groups]
    if normalise_std:
        variance_G = np.bincount(groups, centred_B**2) / np.maximum(sizes_G - 1, 1)
        centred_B = centred_B / (np.sqrt(variance_G) + eps)[groups]
    low_G = np.full(len(sizes_G), np.inf)
    high_G = np.full(len(sizes_G), -np.inf)
    np.minimum.at(low_G, groups, rewards_B)
    np.maximum.at(high_G, groups, rewards_B)
    equal_B = (low_G == high_G)[groups]
    return np.where(equal_B, 0.0, centred_B).astype(np.float32)


def grpo_stage(options: GrpoOptions) -> Stage:
    """The stage: reads `reward` and `response_ids` of whole groups, writes `advantages`."""

    def stage(batch: Batch) -> Mapping[str, Any]:
        response = batch["response_ids"]
        advantages = group_advantages(
            batch["reward"].array,
            group_index(batch),
            normalise_std=options.normalise_std,
            eps=options.eps,
        )
        return {"advantages": Column(np.repeat(advantages, response.lengths), response.offsets)}

    return stage
