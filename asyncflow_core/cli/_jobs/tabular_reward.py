"""The reward of this job, and how it becomes advantages. Change both as you like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncflow_core.batch import Batch
from asyncflow_core.parts import group_index


def right(response: str, answer: str) -> float:
    """1 for the answer and nothing else.

    Parameters are `prompt`, `response`, and fields of prompts.jsonl by their names. What raises
    counts 0, and `asyncflow report` tells.
    """
    return float(response == answer)


def advantages(batch: Batch) -> Mapping[str, Any]:
    """How much better each response is than the others to its prompt (GRPO).

    Ready made, in asyncflow-algorithms: `advantage: {plugin: grpo}`.
    """
    reward, group = batch["reward"].array.astype(np.float64), group_index(batch)
    rows = np.bincount(group)
    centred = reward - (np.bincount(group, reward) / rows)[group]
    spread = np.sqrt(np.bincount(group, centred**2) / rows)[group]
    advantage = (centred / (spread + 1e-6)).astype(np.float32)
    lengths = batch["response_ids"].lengths
    return {"advantages": [np.full(n, a) for n, a in zip(lengths, advantage, strict=True)]}
