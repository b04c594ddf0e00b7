"""What this distribution offers; imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registrar
from asyncflow_core.services.rollout import RolloutCapabilities, SwitchMode
from asyncflow_transformers.options import (
    RolloutOptions,
    TokenizerOptions,
    check_rollout,
    check_tokenizer,
    most_tokens,
)

if TYPE_CHECKING:
    from asyncflow_transformers.service import TransformersRollout
    from asyncflow_transformers.tokenizer import HuggingFaceTokenizer

__all__ = ["CAPABILITIES", "asyncflow_register", "capabilities"]

CAPABILITIES = RolloutCapabilities(
    switch_modes=frozenset(SwitchMode),
    weight_sources=frozenset({"buckets", "path", "collective"}),
    sampling=frozenset(
        {"max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids"}
    ),
    prefix=True,
    seeds=True,
    pause=True,
    readback=True,
)
"""But for `max_tokens`, which is the model's."""


def capabilities(options: RolloutOptions) -> RolloutCapabilities:
    """What it can do with these options."""
    return replace(CAPABILITIES, max_tokens=most_tokens(options))


def _rollout(options: RolloutOptions, context: PartContext) -> TransformersRollout:
    from asyncflow_transformers.service import TransformersRollout

    return TransformersRollout(options, context)


def _tokenizer(options: TokenizerOptions, context: PartContext) -> HuggingFaceTokenizer:
    del context
    from asyncflow_transformers.tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(options)


@hookimpl
def asyncflow_register(registrar: Registrar) -> None:
    """Offer the rollout and the tokenizer."""
    registrar.add(
        "rollout",
        "transformers",
        _rollout,
        api_version=1,
        options=RolloutOptions,
        capabilities=capabilities,
        check=check_rollout,
    )
    registrar.add(
        "tokenizer",
        "huggingface",
        _tokenizer,
        api_version=1,
        options=TokenizerOptions,
        check=check_tokenizer,
    )
