"""A stage of columns: advantages by hand, as `advantage: {plugin: grpo}` makes them without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncflow_core.batch import Batch
from asyncflow_core.parts import group_index


def centred(batch: Batch) -> Mapping[str, Any]:
    """Each row's reward minus the mean of its prompt group, on every token of the response."""
    reward, group = batch["reward"].array, group_index(batch)
    mean = np.bincount(group, reward) / np.bincount(group)
    advantage = (reward - mean[group]).astype(np.float32)
    lengths = batch["response_ids"].lengths
    return {"advantages": [np.full(n, a) for n, a in zip(lengths, advantage, strict=True)]}
