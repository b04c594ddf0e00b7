"""The rows of the store's benchmark: the same for ours and the peer; numpy only."""

from __future__ import annotations

import numpy as np

OPERATIONS = {1: 200, 16: 60, 256: 8}
"""Calls of a round by batch size."""
PIPELINE_ROWS, PIPELINE_BATCH = 1600, 8


class Rows:
    """About 10.6 kB each: 256 prompt ids, 64 to 2048 response ids and log-probs, a reward."""

    def __init__(self, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(64, 2049, count)
        self.prompts = rng.integers(0, 32000, (count, 256))  # int64
        self.responses = [rng.integers(0, 32000, n, dtype=np.int32) for n in lengths]
        self.logprobs = [rng.standard_normal(n, dtype=np.float32) for n in lengths]
        self.rewards = rng.standard_normal(count, dtype=np.float32)

    @property
    def nbytes(self) -> int:
        arrays = (self.prompts, *self.responses, *self.logprobs, self.rewards)
        return sum(array.nbytes for array in arrays)
