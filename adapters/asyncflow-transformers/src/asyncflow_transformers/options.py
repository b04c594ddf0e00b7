"""What a user may set, checked without importing torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "MOST_DEFAULT_LENGTH",
    "RolloutOptions",
    "TokenizerOptions",
    "check_rollout",
    "check_tokenizer",
    "most_tokens",
]

MOST_DEFAULT_LENGTH = 4096
"""Tokens of prompt and response where `max_length` is left out, though a model may take more."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class RolloutOptions(BaseModel):
    """Options of the `transformers` rollout."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: str
    """Directory of a Hugging Face causal language model."""
    slots: int = Field(default=64, ge=1)
    """Sequences decoded at once; more wait."""
    max_length: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and response; each slot's cache holds that many. By default the
    model's own limit, but no more than 4096."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights; published weights must have the same."""
    device: str = "auto"
    """"auto" is the first visible CUDA device where there is one, else the CPU."""
    threads: int = Field(default=1, ge=1)
    """Threads of CPU operations."""
    prefill_tokens: int = Field(default=8192, ge=1)
    """Most padded tokens in one forward over prompts; bounds its memory."""
    engine_args: Mapping[str, Any] = Field(default_factory=dict)
    """Passed untouched to `AutoModelForCausalLM.from_pretrained`."""


class TokenizerOptions(BaseModel):
    """Options of the `huggingface` tokenizer."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: str
    """Directory with the tokenizer's files, usually the model's."""
    engine_args: Mapping[str, Any] = Field(default_factory=dict)
    """Passed untouched to `AutoTokenizer.from_pretrained`."""


def check_rollout(options: RolloutOptions) -> Iterator[str]:
    """The faults that can be seen without loading the model."""
    path = Path(options.model)
    if not path.is_dir():
        yield f"model {options.model!r} is no directory; give the path of a Hugging Face model"
    elif not (path / "config.json").is_file():
        yield f"model {options.model!r} has no config.json; give the path of a Hugging Face model"
    elif not any(path.glob("*.safetensors")):
        yield f"model {options.model!r} has no *.safetensors; save it with save_pretrained"


def most_tokens(options: RolloutOptions) -> int:
    """Most tokens of a prompt and its response, as far as the model's config.json tells."""
    if options.max_length is not None:
        return options.max_length
    try:
        config = json.loads((Path(options.model) / "config.json").read_text("utf-8"))
        limit = {**config, **(config.get("text_config") or {})}.get("max_position_embeddings")
    except (OSError, ValueError, TypeError, AttributeError):  # who loads the model says it
        limit = None
    limit = options.engine_args.get("max_position_embeddings", limit)
    return min(limit, MOST_DEFAULT_LENGTH) if isinstance(limit, int) else MOST_DEFAULT_LENGTH


def check_tokenizer(options: TokenizerOptions) -> Iterator[str]:
    """The faults that can be seen without loading the tokenizer."""
    path = Path(options.model)
    if not path.is_dir():
        yield f"tokenizer {options.model!r} is no directory; give the path of a Hugging Face model"
    elif not any((path / name).is_file() for name in _TOKENIZER_FILES):
        yield (
            f"tokenizer {options.model!r} has none of {', '.join(_TOKENIZER_FILES)}; "
            f"save it there with save_pretrained"
        )
