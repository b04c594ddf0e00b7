"""Draw tokens from logits, reproducibly and whatever else is in the batch.

Shapes: B rows, V vocabulary entries.

One uniform per (seed, token index) comes from a counter-based hash, so a row's draw depends on
nothing but its own logits, its seed and how many tokens its response already has. The uniform is
inverted through the CDF in vocabulary order, with the CDF summed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DrawParams", "draw", "stream_states", "truncation_mask", "uniforms"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit words so that any input bit flips each output bit half of the time.

    Source: the finalizer of SplitMix64 (Steele, Lea, Flood 2014; prng.di.unimi.it/splitmix64.c).
    """
    x = (x ^ (x >> _S30)) * _MIX_1
    x = (x ^ (x >> _S27)) * _MIX_2
    return x ^ (x >> _S31)


def stream_states(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Turn seeds into stream states, so that neighbouring seeds give unrelated streams."""
    return _mix64(seeds + _GOLDEN)


def uniforms(states: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Hash (stream state, token index) to one uniform each.

    Args:
        states: what `stream_states` made of each row's seed.
        indices: number of response tokens the row already has.

    Returns:
        Values in [0, 1), multiples of 2**-53.
    """
    counter = indices.astype(np.uint64) + np.uint64(1)
    return (_mix64(states + counter * _GOLDEN) >> _S11).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Sampling parameters of a batch, on the device, with what can be skipped already decided.

    Shapes: every tensor but `rows` is [B]; `rows` lists the truncating rows.
    """

    temperature: torch.Tensor | None
    """float32 [B, 1] divisors, 1 where greedy; None when all are 1."""
    greedy: torch.Tensor | None
    """bool [B]; None when no row is greedy."""
    rows: torch.Tensor | None
    """int64 indices of the rows that truncate; None when none does."""
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def build(
        cls,
        temperature: NDArray[np.float64],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float64],
        min_p: NDArray[np.float64],
        *,
        device: torch.device | str = "cpu",
    ) -> DrawParams:
        """Decide once per change of the batch which parts of `draw` its rows need.

        Args:
            temperature: 0 is greedy.
            top_k: 0 is off.
            top_p: 1 is off.
            min_p: 0 is off.
            device: where the logits are.

        Returns:
            The parameters; they stay valid while the batch has the same rows in the same order.
        """
        greedy = temperature == 0.0
        divisor = np.where(greedy, 1.0, temperature).astype(np.float32)
        # A greedy row takes the largest logit, which truncation never removes.
        cuts = ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)) & ~greedy
        rows = np.flatnonzero(cuts)

        def put(array: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        return cls(
            temperature=None if (divisor == 1.0).all() else put(divisor[:, None]),
            greedy=put(greedy) if greedy.any() else None,
            rows=put(rows) if rows.size else None,
            top_k=put(top_k[rows]),
            top_p=put(top_p[rows]),
            min_p=put(min_p[rows]),
        )


def truncation_mask(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Say which tokens may be drawn: top-k, then top-p of what is left, then min-p.

    top-k keeps exactly k tokens (of equal ones, those with the lower ids). top-p keeps the
    shortest list of most probable tokens whose renormalised mass reaches top_p. min-p keeps what
    is at least min_p times as probable as the most probable token, which always stays.

    Args:
        probs: probabilities over the whole vocabulary.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.

    Returns:
        True where a token may be drawn.

    Shapes: probs [B, V]; top_k, top_p, min_p [B]; result bool [B, V].
    """
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    ranked = ranked.double()
    rank = torch.arange(probs.shape[-1], device=probs.device)
    ranked = ranked.masked_fill((rank >= top_k[:, None]) & (top_k > 0)[:, None], 0.0)
    total = ranked.sum(dim=-1, keepdim=True)
    before = ranked.cumsum(dim=-1) - ranked
    # top_p = 1 keeps all by decree: the sum in `before` may round up to the total early.
    keep = (before < top_p[:, None] * total) | (top_p >= 1.0)[:, None]
    keep &= ranked >= min_p[:, None] * ranked[:, :1]
    keep &= ranked > 0.0
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def draw(
    logits: torch.Tensor, uniform: torch.Tensor, params: DrawParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row and return its behaviour log-prob.

    The log-prob is log softmax(logits / temperature) over the WHOLE vocabulary in float32, also
    where truncation narrowed the draw. A greedy row (temperature 0) takes the largest logit and
    reports the log-prob at temperature 1.

    Args:
        logits: raw logits, any float dtype.
        uniform: float64 values in [0, 1).
        params: the rows' parameters.

    Returns:
        Token ids and their log-probs. A row with a NaN logit gets a NaN log-prob; a token of
        probability zero is never drawn.

    Shapes: logits [B, V]; uniform [B]; results int64 [B], float32 [B].
    """
    scaled = logits.float()
    if params.temperature is not None:
        scaled = scaled / params.temperature
    logprobs = scaled.log_softmax(dim=-1)
    probs = logprobs.exp()
    if params.rows is not None:
        part = probs[params.rows]
        keep = truncation_mask(part, params.top_k, params.top_p, params.min_p)
        probs[params.rows] = part.masked_fill(~keep, 0.0)
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1:]
    # uniform * total may round up to total; then no entry would lie above it.
    target = torch.minimum(uniform[:, None] * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(cdf, target, right=True)
    if params.greedy is not None:
        best = scaled.argmax(dim=-1, keepdim=True)
        tokens = torch.where(params.greedy[:, None], best, tokens)
    # A NaN row has no entry above its target; the clamp lets its NaN log-prob be gathered.
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]
