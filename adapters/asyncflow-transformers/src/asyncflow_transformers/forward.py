"""The two ways to run a model over the slot cache: transformers' own forward, and a lean one.

Shapes: n busy rows, b rows of a prefill, T tokens, V vocabulary entries.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from asyncflow_transformers.lean import LeanForward
from asyncflow_transformers.support import SUPPORTED

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from asyncflow_transformers.cache import SlotCache

__all__ = ["Forward", "HfForward", "make_forward"]

logger = logging.getLogger(__name__)

# Far above float32 rounding (about 1e-6 of the largest logit), far below any wrong mask.
_PROBE_TOLERANCE = 1e-4


class Forward(Protocol):
    """Runs the model over the slots."""

    def prefill(self, tokens: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Fill the cache of `rows` at positions 0..T-1. Shapes: tokens [b, T]; rows [b]."""

    def decode(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> torch.Tensor:
        """Take one token into each of the first n rows and return the logits [n, V]."""


class HfForward:
    """Calls the model as any user of transformers does, with the slot cache as its cache.

    Source: transformers 5.24: a 4-D mask is used as it is (`masking_utils.
    _preprocess_mask_arguments`); with none, the model makes a causal one from the cache's sizes.
    """

    def __init__(self, model: PreTrainedModel, cache: SlotCache, *, max_length: int) -> None:
        """Find out how the model's forward names its cache."""
        parameters = inspect.signature(model.forward).parameters
        self._model = model
        self._cache = cache
        self._max_length = max_length
        self._device = model.device
        # transformers 5 renamed past_key_values, with an alias until 5.40.
        name = "cache" if "cache" in parameters else "past_key_values"
        self._kwargs: dict[str, Any] = {name: cache, "use_cache": True}
        if "logits_to_keep" in parameters:
            self._kwargs["logits_to_keep"] = 1

    def prefill(self, tokens: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Fill the cache of `rows` at positions 0..T-1. Shapes: tokens [b, T]; rows [b]."""
        self._cache.begin_prefill(torch.from_numpy(rows).to(self._device))
        positions = torch.arange(tokens.shape[1], device=self._device).expand(tokens.shape)
        ids = torch.from_numpy(tokens).to(self._device)
        self._model(input_ids=ids, position_ids=positions, **self._kwargs)

    def decode(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> torch.Tensor:
        """Take one token into each of the first n rows and return the logits [n, V]."""
        length = int(positions.max()) + 1
        targets = positions + np.arange(positions.shape[0]) * self._max_length
        self._cache.begin_decode(torch.from_numpy(targets).to(self._device), length=length)
        at = torch.from_numpy(positions).to(self._device)[:, None]
        mask = decode_mask(at, length, self._model.dtype)
        ids = torch.from_numpy(tokens).to(self._device)[:, None]
        out = self._model(
            input_ids=ids, position_ids=at, attention_mask=mask[:, None, None], **self._kwargs
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits


def decode_mask(positions: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask that lets each row see its positions 0..position.

    Shapes: positions [n, 1]; result [n, length].
    """
    hidden = torch.arange(length, device=positions.device) > positions
    zeros = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return zeros.masked_fill_(hidden, torch.finfo(dtype).min)


def make_forward(
    model: PreTrainedModel, cache: SlotCache, *, slots: int, max_length: int, vocab_size: int
) -> Forward:
    """Choose the forward and prove it on a few tokens.

    Args:
        model: a model that `support.check_supported` let pass.
        cache: its slots, not in use yet.
        slots: rows of the cache.
        max_length: positions of a row, 2 or more.
        vocab_size: token ids lie in [0, vocab_size).

    Returns:
        The lean forward where it fits and agrees with the model's own, else the model's own.

    Raises:
        ValueError: the model's own forward gives other logits over the cache than without one.
    """
    if LeanForward.fits(model):
        lean = LeanForward(model, cache, max_length=max_length)
        if (
            _probe_error(model, lean, min(slots, 2), min(max_length, 6), vocab_size)
            <= _PROBE_TOLERANCE
        ):
            return lean
        logger.warning(
            "the lean forward disagrees with %s; using the model's own", type(model).__name__
        )
    own = HfForward(model, cache, max_length=max_length)
    # Half precision rounds by far more than the tolerance, so there a probe proves nothing.
    if model.dtype == torch.float32:
        error = _probe_error(model, own, min(slots, 2), min(max_length, 6), vocab_size)
        if error > _PROBE_TOLERANCE:
            raise ValueError(
                f"cannot serve model_type {model.config.model_type!r} exactly: logits over the "
                f"key-value cache differ from the plain forward's by {error:.1e} of the largest, "
                f"allowed: {_PROBE_TOLERANCE:.0e}; supported are {SUPPORTED}"
            )
    return own


@torch.inference_mode()
def _probe_error(
    model: PreTrainedModel, forward: Forward, rows: int, width: int, vocab_size: int
) -> float:
    """Return the largest logit error, relative to the largest logit, on ragged probe rows.

    Weights that give no finite logits (as before the first load) prove nothing and return 0.
    """
    tokens = (np.arange(rows * width).reshape(rows, width) * 7 + 3) % vocab_size
    last = width - 1 - np.arange(rows)
    at = np.arange(rows)
    forward.prefill(tokens[:, : width - 1], at)
    got = forward.decode(tokens[at, last], last)
    ids = torch.from_numpy(tokens).to(model.device)
    expected = model(input_ids=ids, use_cache=False).logits[at, last]
    scale = expected.abs().max()
    if not torch.isfinite(scale):
        return 0.0
    error = (got - expected).abs().max() / scale.clamp(min=torch.finfo(scale.dtype).tiny)
    return float(error.nan_to_num(nan=torch.inf))
