"""A tokenizer of single characters."""

from __future__ import annotations

import string
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from asyncflow_core.config import Section
from asyncflow_core.errors import DataError
from asyncflow_core.parts import PartContext, Tokenizer

__all__ = ["CharactersOptions", "CharactersTokenizer"]


class CharactersOptions(Section):
    """Options of the `characters` tokenizer."""

    alphabet: str = Field(
        default=string.digits + string.ascii_letters + string.punctuation + " \n", min_length=1
    )
    """The i-th character has the id i."""
    eos: bool = True
    """Whether there is an id that ends a response: the one after the alphabet's."""
    bos: bool = False
    """Whether every prompt starts with a further id: the last one."""

    @field_validator("alphabet")
    @classmethod
    def _distinct(cls, alphabet: str) -> str:
        twice = sorted({character for character in alphabet if alphabet.count(character) > 1})
        if twice:
            raise ValueError(f"the alphabet has {', '.join(map(repr, twice))} more than once")
        return alphabet


class CharactersTokenizer(Tokenizer):
    """A token a character."""

    def __init__(self, options: CharactersOptions, ctx: PartContext) -> None:
        """Number the characters."""
        self._alphabet = options.alphabet
        self._ids = {character: i for i, character in enumerate(options.alphabet)}
        eos = len(self._alphabet)
        self.eos_token_ids = (eos,) if options.eos else ()
        self._prefix = [eos + options.eos] if options.bos else []
        self.vocab_size = eos + options.eos + options.bos

    def encode(self, text: str) -> list[int]:
        """Token ids; `DataError` for a character outside the alphabet."""
        unknown = next((character for character in text if character not in self._ids), None)
        if unknown is not None:
            raise DataError(f"the character {unknown!r} is not in the alphabet {self._alphabet!r}")
        return [*self._prefix, *(self._ids[character] for character in text)]

    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Text of the alphabet's ids; `DataError` for an id outside the vocabulary."""
        wrong = [int(i) for i in ids if not 0 <= i < self.vocab_size]
        if wrong:
            raise DataError(
                f"the token id {wrong[0]} is not in the vocabulary of {self.vocab_size}"
            )
        return "".join(self._alphabet[i] for i in ids if i < len(self._alphabet))
