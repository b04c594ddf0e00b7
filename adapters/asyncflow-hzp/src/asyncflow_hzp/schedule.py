"""The learning rate over updates."""

from __future__ import annotations

import math

from asyncflow_hzp.options import HzpOptions

__all__ = ["learning_rate"]


def learning_rate(options: HzpOptions, updates: int) -> float:
    """The rate of the update that follows `updates` others."""
    warmup = options.warmup_updates
    if updates < warmup:
        return options.lr * (updates + 1) / warmup
    if options.schedule == "constant" or options.total_updates is None:
        return options.lr
    falling = max(options.total_updates - warmup, 1)
    done = min((updates - warmup) / falling, 1.0)
    if options.schedule == "linear":
        return options.lr * (1.0 - done)
    return options.lr * 0.5 * (1.0 + math.cos(math.pi * done))
