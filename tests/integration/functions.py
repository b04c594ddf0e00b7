"""Stages and rewards of the integration tests, by `module:name`."""

import numpy as np

from asyncflow_core.parts import group_index


def next_letter(response: str, prompt: str) -> float:
    """1 for the letter after the prompt's last one."""
    return float(response == chr((ord(prompt[-1]) - ord("a") + 1) % 26 + ord("a")))


def raises(response: str) -> float:
    raise ValueError(f"cannot judge {response!r}")


def centred(batch):
    """Rewards minus their group's mean, a value a token."""
    groups, rewards = group_index(batch), np.asarray(batch["reward"].array, np.float64)
    means = np.bincount(groups, rewards) / np.bincount(groups)
    lengths = batch["response_ids"].lengths
    return {"advantages": [[a] * n for a, n in zip(rewards - means[groups], lengths, strict=True)]}


def wrong_columns(batch):
    return {"nonsense": [0] * batch.rows}


def low_letter(response: str) -> float:
    """1 for a, 0 for z."""
    return (ord("z") - ord(response)) / 25
