"""Stop strings: matched on the decoded end of a response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["StopStrings"]

_CONTEXT = 8
"""Tokens decoded before those a stop string can span: a word's spelling may depend on them."""

Decode = Callable[[Any], str]


class StopStrings:
    """Says after each token whether the response now contains a stop string.

    A token is at least one byte of text, so a string just completed lies in the last tokens.
    """

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        self._window = max(len(string.encode()) for string in strings) + _CONTEXT

    def reached(self, response: NDArray[np.integer[Any]]) -> bool:
        """Whether one is there; to be asked after every token."""
        text = self._decode(response[-self._window :])
        return any(string in text for string in self._strings)
