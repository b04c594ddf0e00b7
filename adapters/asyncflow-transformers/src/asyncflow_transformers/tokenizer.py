"""Tokenizers of Hugging Face model directories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer, GenerationConfig

from asyncflow_core.errors import ConfigError
from asyncflow_core.parts import Tokenizer
from asyncflow_transformers.options import TokenizerOptions, check_tokenizer

__all__ = ["HuggingFaceTokenizer"]


class HuggingFaceTokenizer(Tokenizer):
    """`AutoTokenizer`, with the ending tokens of the model beside it."""

    def __init__(self, options: TokenizerOptions) -> None:
        faults = list(check_tokenizer(options))
        if faults:
            raise ConfigError(faults)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(options.model, **options.engine_args)
        self.vocab_size = len(self._tokenizer)
        self.has_chat_template = bool(self._tokenizer.chat_template)
        own = self._tokenizer.eos_token_id
        ends = [*_generation_ends(Path(options.model)), *([] if own is None else [own])]
        self.eos_token_ids = tuple(dict.fromkeys(int(token) for token in ends))

    def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens the model wants in front."""
        return list(self._tokenizer(text).input_ids)

    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Text without special tokens, spaces as they were."""
        return self._decode(ids, skip_special_tokens=True)

    def decode_all(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Text with special tokens spelled out."""
        return self._decode(ids, skip_special_tokens=False)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation by the model's chat template."""
        if not self.has_chat_template:
            return super().encode_chat(messages)
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        # The template writes the special tokens itself.
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _decode(self, ids: Sequence[int] | NDArray[np.int32], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(
            np.asarray(ids, np.int64).tolist(),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text


def _generation_ends(path: Path) -> list[int]:
    if not (path / "generation_config.json").is_file():
        return []
    ends = GenerationConfig.from_pretrained(path).eos_token_id
    if ends is None:
        return []
    return list(ends) if isinstance(ends, (list, tuple)) else [ends]
