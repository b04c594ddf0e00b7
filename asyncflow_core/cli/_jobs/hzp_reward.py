"""The reward of this job; change it as you like."""

from __future__ import annotations

import re


def right(response: str, answer: str) -> float:
    """1 where the last number of the response is the answer.

    Parameters are `prompt`, `response`, and fields of prompts.jsonl by their names. What raises
    counts 0, and `asyncflow report` tells.
    """
    numbers = re.findall(r"-?\d+", response)
    return float(bool(numbers) and numbers[-1] == answer)
