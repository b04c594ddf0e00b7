"""From sums to costs: least squares, no cost below 0, no cause that explains nothing.

Pure. The sums are those of `flow.working.costs`: products of (1, second, third cause, seconds).

Source: G. Schwarz, "Estimating the dimension of a model", 1978, for how many causes there are.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.flow.working.costs import CAUSES

__all__ = ["add", "count", "fit", "mean"]

_EXACT = 1e-12
"""Of the squares of all seconds, what is left by rounding where causes explain everything."""
_SAME = 1e-3
"""Criteria that differ by less differ by rounding."""
_NO_CAUSE = (0.0,) * 10


def add(left: Sequence[float], right: Sequence[float]) -> tuple[float, ...]:
    """Sums over both."""
    pairs = zip(left or _NO_CAUSE, right or _NO_CAUSE, strict=True)
    return tuple(a + b for a, b in pairs)


def count(sums: Sequence[float]) -> int:
    """How many there were."""
    return int(sums[0]) if sums else 0


def mean(sums: Sequence[float], cause: int) -> float:
    """Mean of the second or third cause (1, 2), or of the seconds (3)."""
    return sums[cause] / sums[0]


def fit(sums: Sequence[float], causes: Sequence[int] = (1, 2, 0)) -> tuple[float, ...]:
    """Seconds that each cause takes, never below 0; 0 for those not among `causes`.

    Each set of causes is tried. A cause counts where it explains more than chance would, by the
    Bayesian information criterion; of sets that explain the same, the first is taken, so that of
    causes that grow together one stands for all.

    Args:
        sums: of at least one observation.
        causes: that are possible, the likely ones first.

    Shapes:
        result: [3], seconds for the call itself, for the second and for the third cause.
    """
    products = np.zeros((CAUSES + 1, CAUSES + 1))
    products[np.triu_indices(CAUSES + 1)] = sums
    products += np.triu(products, 1).T
    number, least = sums[0], _EXACT * products[-1, -1]
    best, score = np.zeros(CAUSES), float("inf") if least else float("-inf")
    for size in range(1, len(causes) + 1):
        for chosen in itertools.combinations(causes, size):
            costs, left = _solved(products, chosen)
            found = number * math.log(max(left, least, sys.float_info.min)) + size * math.log(
                number
            )
            if found < score - _SAME:
                best, score = costs, found
    return tuple(float(cost) for cost in best)


def _solved(
    products: NDArray[np.float64], chosen: Sequence[int]
) -> tuple[NDArray[np.float64], float]:
    """Costs of these causes, and the squares they leave; infinite where one is negative."""
    at = list(chosen)
    scale = np.sqrt(np.diag(products)[at])
    costs = np.zeros(CAUSES)
    if not scale.all():
        return costs, float("inf")
    square = products[np.ix_(at, at)] / np.outer(scale, scale)
    right = products[at, -1] / scale
    solved, *_ = np.linalg.lstsq(square, right, rcond=1e-12)
    costs[at] = solved / scale
    if (costs < 0).any():
        return costs, float("inf")
    left = products[-1, -1] - 2 * costs[at] @ products[at, -1]
    left += costs[at] @ products[np.ix_(at, at)] @ costs[at]
    return costs, max(0.0, float(left))
