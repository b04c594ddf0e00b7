"""The reward of this example: any function of one row."""

from __future__ import annotations


def right_letter(response: str, answer: str) -> float:
    """1 for the right letter and nothing after it."""
    return float(response == answer)
