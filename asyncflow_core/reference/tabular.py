"""A tabular softmax policy: exact log-probs, exact gradients, exact sampling, in numpy.

The next token depends on a context: the prompt's last token, the position in the response and,
where asked for, the previous token. Each context has its own row of logits, so everything a
language model does in AsyncFlow can be checked against arithmetic done by hand.

Shape letters: V vocabulary, C contexts a position, N tokens (of any sequences).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from asyncflow_core.config import Section
from asyncflow_core.errors import ConfigError, DataError
from asyncflow_core.parts import PartContext
from asyncflow_core.services.rollout import SamplingParams
from asyncflow_core.services.weight_sync import TensorSpec

__all__ = ["TabularModel", "TabularOptions", "draw_tokens", "log_softmax", "truncate", "uniform"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class TabularOptions(Section):
    """The model; a rollout and a trainer with equal values start from equal weights."""

    vocab_size: int | None = Field(default=None, ge=2)
    """Token ids are below this; None takes the run's tokenizer's."""
    positions: int = Field(default=8, ge=1)
    """Response positions told apart; later ones share the last."""
    previous_token: bool = False
    """Whether the context also holds the token before the one to come."""
    init_seed: int = Field(default=0, ge=0)
    """Seed of the first logits."""
    init_scale: float = Field(default=0.0, ge=0.0)
    """Standard deviation of the first logits; 0 is the uniform policy."""


class TabularModel:
    """The logits, float64 [positions, C, V], one tensor a position in the Hugging Face manner."""

    def __init__(self, options: TabularOptions, ctx: PartContext) -> None:
        """Draw the first logits."""
        vocab = options.vocab_size or (ctx.tokenizer.vocab_size if ctx.tokenizer else None)
        if vocab is None:
            raise ConfigError(
                f"{ctx.name or 'tabular'}: vocab_size is not given and there is no tokenizer to "
                f"take it from; set the option vocab_size"
            )
        self.vocab_size: int = vocab
        self._previous = options.previous_token
        contexts = vocab * vocab if options.previous_token else vocab
        shape = (options.positions, contexts, vocab)
        rng = np.random.default_rng(options.init_seed)
        self.logits: Floats = options.init_scale * rng.standard_normal(shape)
        """float64 [positions, C, V]."""

    @property
    def rows(self) -> Floats:
        """The logits of every context, a view [positions * C, V]."""
        return self.logits.reshape(-1, self.vocab_size)

    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors by name, without offsets."""
        positions, *shape = self.logits.shape
        return tuple(
            TensorSpec(f"model.layers.{position}.weight", "F64", tuple(shape))
            for position in range(positions)
        )

    def tensors(self, logits: Floats | None = None) -> dict[str, Floats]:
        """Name to a view of the logits (default: those that serve)."""
        table = self.logits if logits is None else logits
        return {spec.name: table[i] for i, spec in enumerate(self.specs())}

    def check_ids(self, ids: NDArray[np.int32], what: str) -> None:
        """`DataError` for a token id outside the vocabulary."""
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            raise DataError(
                f"{what} has token ids from {ids.min()} to {ids.max()}; "
                f"the vocabulary is 0 to {self.vocab_size - 1}"
            )

    def context(self, prompt_last: int, position: int, previous: int) -> int:
        """Which of `rows` gives the logits of the token at `position`.

        Args:
            prompt_last: last token of the prompt.
            position: of the token in the response, from 0.
            previous: the token before it; the prompt's last one at position 0.
        """
        within = prompt_last * self.vocab_size + previous if self._previous else prompt_last
        positions, contexts = len(self.logits), len(self.logits[0])
        return min(position, positions - 1) * contexts + within

    def contexts(self, prompt: NDArray[np.int32], response: NDArray[np.int32]) -> Ints:
        """`context` of every response token, int64 [T]."""
        if not len(prompt):
            raise DataError("a prompt is empty; the tabular policy needs its last token")
        last = int(prompt[-1])
        within = np.full(len(response), last, np.int64)
        if self._previous and len(response):
            previous = np.concatenate(([last], response[:-1]))
            within = within * self.vocab_size + previous
        positions = np.minimum(np.arange(len(response)), len(self.logits) - 1)
        contexts: Ints = positions * self.logits.shape[1] + within
        return contexts


def log_softmax(logits: Floats) -> Floats:
    """Over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def truncate(probs: Floats, sampling: SamplingParams) -> Floats:
    """The probabilities [V] that top-p, top-k and min-p leave, not renormalised, the rest 0.

    Ties are broken by token id, and the likeliest token always stays.
    """
    order = np.argsort(-probs, kind="stable")
    ranked = probs[order]
    keep = ranked >= sampling.min_p * ranked[0]
    if sampling.top_k:
        keep[sampling.top_k :] = False
    if sampling.top_p < 1.0:
        keep &= np.cumsum(ranked) - ranked < sampling.top_p
    keep[0] = True
    kept = np.zeros_like(probs)
    kept[order[keep]] = ranked[keep]
    return kept


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on the seed and the token's index alone (splitmix64).

    Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    mask = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15 * (index + 1)) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = ((z ^ (z >> shift)) * factor) & mask
    return ((z ^ (z >> 31)) >> 11) / (1 << 53)


def draw_tokens(
    logits: Floats, samplings: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Draw a token for each row of logits [N, V].

    A greedy row (temperature 0) takes the largest logit.

    Returns:
        Tokens [N] and their log-probs [N] over the whole vocabulary at the row's temperature, at
        temperature 1 for a greedy row.
    """
    temperatures = np.array([sampling.temperature or 1.0 for sampling in samplings])
    logprobs = log_softmax(logits / temperatures[:, None])
    tokens = np.argmax(logprobs, -1).astype(np.int32)
    for row, (sampling, number) in enumerate(zip(samplings, uniforms, strict=True)):
        if sampling.temperature:
            probs = np.exp(logprobs[row])
            sums = np.cumsum(truncate(probs, sampling) if sampling.truncates else probs)
            # Kept below the last sum whatever rounding does: a token that was cut off has no
            # width, so it is never found.
            at = min(number * sums[-1], np.nextafter(sums[-1], 0.0))
            tokens[row] = np.searchsorted(sums, at, side="right")
    chosen = logprobs[np.arange(len(tokens)), tokens]
    return tokens, chosen.astype(np.float32)
