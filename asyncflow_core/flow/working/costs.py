"""What work costs, as sums from which `flow.simulation.fitting` finds the cost of each cause. Pure.

A call of a stage takes so long for being a call, for each of its rows and for each of their tokens;
a response takes so long for being one, for each token, and for each token and row beside it.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncflow_core.batch import Key

__all__ = ["CAUSES", "Costs", "Running", "Serial"]

CAUSES = 3
"""Of a call: itself, rows, tokens. Of a response: itself, tokens, tokens times rows running."""


class Costs:
    """Sums of products of causes and seconds: the normal equations of least squares.

    Attributes:
        sums: over all pairs of (1, second cause, third cause, seconds), the upper triangle by rows;
            the first is how many there were.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.sums = [0.0] * 10

    def add(self, seconds: float, second: float, third: float) -> None:
        """Something took so long, with these causes beside itself."""
        values = (1.0, second, third, seconds)
        at = 0
        for row, left in enumerate(values):
            for right in values[row:]:
                self.sums[at] += left * right
                at += 1


class Serial:
    """Calls that one after another are worked on: each from its begin or the end of the last."""

    def __init__(self, costs: Costs) -> None:
        """Add to `costs`."""
        self._costs = costs
        self._ended = 0.0

    def call(self, began: float, ended: float, *, rows: int, tokens: int) -> None:
        """One ended that was asked for at `began`; seconds of one clock."""
        self._costs.add(max(0.0, ended - max(began, self._ended)), rows, tokens)
        self._ended = ended


class Running:
    """Responses that run side by side: each with how many did, on the mean over its time."""

    def __init__(self, costs: Costs) -> None:
        """Add to `costs`."""
        self._costs = costs
        self._began: dict[Key, tuple[float, float]] = {}
        self._row_s = self._at = 0.0

    def begin(self, keys: Iterable[Key], now: float) -> None:
        """These run from now on."""
        self._pass(now)
        for key in keys:
            self._began[key] = now, self._row_s

    def end(self, key: Key, now: float, *, tokens: int) -> None:
        """One ended, with so many tokens; one that never began, or was stopped, is ignored."""
        self._pass(now)
        began = self._began.pop(key, None)
        if began is not None and now > began[0]:
            seconds = now - began[0]
            beside = (self._row_s - began[1]) / seconds
            self._costs.add(seconds, tokens, tokens * beside)

    def stop(self, keys: Iterable[Key], now: float) -> None:
        """These came to nothing."""
        self._pass(now)
        for key in keys:
            self._began.pop(key, None)

    def _pass(self, now: float) -> None:
        self._row_s += len(self._began) * (now - self._at)
        self._at = now
