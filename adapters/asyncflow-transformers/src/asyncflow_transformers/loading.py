"""From a model directory to an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from asyncflow_core.errors import ConfigError
from asyncflow_transformers.options import MOST_DEFAULT_LENGTH, RolloutOptions, check_rollout
from asyncflow_transformers.serving import ServedEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["load_model", "make_engine"]


def load_model(options: RolloutOptions) -> PreTrainedModel:
    """The model, on its device, without gradients.

    Raises:
        ConfigError: the directory holds no model.
    """
    faults = list(check_rollout(options))
    if faults:
        raise ConfigError(faults)
    torch.set_num_threads(options.threads)
    with _without_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(
            options.model, **{"dtype": getattr(torch, options.dtype), **options.engine_args}
        )
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    model.requires_grad_(False)
    loaded: PreTrainedModel = model
    return loaded


def make_engine(
    model: PreTrainedModel, options: RolloutOptions, *, ends: Iterable[int]
) -> ServedEngine:
    """An engine at version 0 that ends at the model's own ending tokens and at `ends`.

    Raises:
        ConfigError: a model or length that cannot be served exactly.
    """
    config = model.config.get_text_config(decoder=True)
    own = [_ids(source.eos_token_id) for source in (model.generation_config, config)]
    tokens = dict.fromkeys(token for ids in (*own, ends) for token in ids)
    limit = getattr(config, "max_position_embeddings", None) or MOST_DEFAULT_LENGTH
    try:
        return ServedEngine(
            model,
            slots=options.slots,
            max_length=options.max_length or min(limit, MOST_DEFAULT_LENGTH),
            version=0,
            eos_token_ids=[token for token in tokens if token < config.vocab_size],
            prefill_tokens=options.prefill_tokens,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _ids(ends: int | Iterable[int] | None) -> list[int]:
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else list(ends)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """A service does not draw on the user's terminal."""
    active = is_progress_bar_enabled()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if active:
            enable_progress_bar()  # type: ignore[no-untyped-call]
