"""Prompts from JSON Lines files.

A line is an object: the prompt under one field, everything else further columns of its rows. All
faults of a file are found before anything starts, each with file and line number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from asyncflow_core.config import InputPath, Section
from asyncflow_core.errors import ConfigError, DataError
from asyncflow_core.parts import (
    KEY_COLUMN,
    PartContext,
    PromptRecord,
    Prompts,
    StageContract,
    encode_prompt,
)
from asyncflow_core.schema import CANONICAL

__all__ = ["JsonlPrompts", "JsonlPromptsOptions", "check_jsonl", "jsonl_contract"]


class JsonlPromptsOptions(Section):
    """Options of the `jsonl` prompts."""

    path: InputPath
    """File of one JSON object a line."""
    prompt: str = "prompt"
    """Field that holds the prompt: text, or messages with `role` and `content`."""
    chat: Literal["auto"] | bool = "auto"
    """Whether text becomes a user message; auto: where the tokenizer has a chat template."""
    evaluation_path: InputPath | None = None
    """File of the held-out prompts; none of them may be in `path`."""
    evaluation_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the prompts of `path` that is held out, chosen by a hash of the prompt."""
    shuffle: bool = True
    """Whether each epoch has an order of its own, by the run's seed; else that of the file."""

    @model_validator(mode="after")
    def _one_source(self) -> JsonlPromptsOptions:
        if self.evaluation_path is not None and self.evaluation_share:
            raise ValueError("give evaluation_path or evaluation_share, not both")
        return self


@dataclass(frozen=True, slots=True)
class _Line:
    """A line that is sound; `place` is file:number."""

    place: str
    prompt: str | list[dict[str, str]]
    fields: dict[str, Any]

    @property
    def text(self) -> str:
        """Equal for equal prompts."""
        return json.dumps(self.prompt, sort_keys=True)


class JsonlPrompts(Prompts):
    """The prompts of a file, held in memory as text and encoded when asked for."""

    def __init__(self, options: JsonlPromptsOptions, ctx: PartContext) -> None:
        """Read the files; `ConfigError` with every fault, or without a tokenizer."""
        if ctx.tokenizer is None:
            raise ConfigError("prompts.jsonl needs a tokenizer; configure one")
        self._train, self._evaluation, faults = _read_all(options)
        if faults:
            raise ConfigError(faults)
        self.fields = tuple(self._train[0].fields)
        self._options, self._seed, self._tokenizer = options, ctx.seed, ctx.tokenizer

    def train(self, epoch: int) -> Iterator[PromptRecord]:
        """One pass over the file's prompts that are not held out."""
        order = np.arange(len(self._train))
        if self._options.shuffle:
            rng = np.random.default_rng([self._seed & (1 << 64) - 1, epoch])
            order = rng.permutation(order)
        return (self._record(self._train[line]) for line in order)

    def evaluation(self) -> Iterator[PromptRecord]:
        """The held-out prompts in file order."""
        return (self._record(line) for line in self._evaluation)

    def _record(self, line: _Line) -> PromptRecord:
        chat = None if self._options.chat == "auto" else self._options.chat
        try:
            ids = encode_prompt(self._tokenizer, line.prompt, chat=chat)
        except (DataError, NotImplementedError) as error:
            raise DataError(f"{line.place}: {error}") from error
        if not ids:
            raise DataError(f"{line.place}: the prompt has no tokens")
        return PromptRecord(ids, line.fields)


def check_jsonl(options: JsonlPromptsOptions) -> list[str]:
    """Every fault of the files, one message each, without starting anything."""
    return _read_all(options)[2]


def jsonl_contract(options: JsonlPromptsOptions) -> StageContract:
    """The columns that the lines bring beside the prompt; none if the file has faults."""
    train, _, _ = _read_all(options)
    return StageContract((), tuple(train[0].fields) if train else ())


def _read_all(options: JsonlPromptsOptions) -> tuple[list[_Line], list[_Line], list[str]]:
    """Lines to train on, lines held out, faults."""
    lines, faults = _read(Path(options.path), options.prompt)
    if options.evaluation_path is None:
        held_out = [line for line in lines if _position(line) < options.evaluation_share]
        train = [line for line in lines if _position(line) >= options.evaluation_share]
        if held_out and not train:
            faults.append(f"{options.path}: evaluation_share holds out every prompt")
        return train, held_out, faults
    held_out, more = _read(Path(options.evaluation_path), options.prompt)
    faults += more
    if lines and held_out:
        faults += _field_faults(held_out, lines[0])
    trained = {line.text: line.place for line in lines}
    for line in held_out:
        if line.text in trained:
            faults.append(f"{line.place}: the held-out prompt is also at {trained[line.text]}")
    return lines, held_out, faults


def _position(line: _Line) -> float:
    """Where the prompt lies in [0, 1): equal prompts are held out together, in every process."""
    digest = hashlib.blake2b(line.text.encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") / (1 << 64))


def _read(path: Path, prompt: str) -> tuple[list[_Line], list[str]]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        return [], [f"{path}: {error.strerror or error}"]
    lines: list[_Line] = []
    faults: list[str] = []
    for number, content in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not content.strip():
            continue
        place = f"{path}:{number}"
        try:
            lines.append(_parse(content, place, prompt))
        except DataError as error:
            faults.append(f"{place}: {error}")
    if not lines and not faults:
        faults.append(f"{path}: the file has no prompts")
    return lines, faults + _field_faults(lines[1:], lines[0] if lines else None)


def _field_faults(lines: Sequence[_Line], first: _Line | None) -> list[str]:
    """Lines whose fields are not those of the first, which make the columns."""
    return [
        f"{line.place}: the fields are {sorted(line.fields)}, "
        f"at {first.place} they are {sorted(first.fields)}"
        for line in lines
        if first is not None and line.fields.keys() != first.fields.keys()
    ]


def _parse(content: bytes, place: str, prompt: str) -> _Line:
    """One line; `DataError` says what is wrong with it."""
    try:
        entry = json.loads(content, object_pairs_hook=_distinct, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise DataError(f"malformed JSON at column {error.colno}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"malformed JSON: {error}") from None
    if not isinstance(entry, dict):
        raise DataError(f"an object is expected, got {type(entry).__name__}")
    if prompt not in entry:
        raise DataError(f"no field {prompt!r} (there are: {sorted(entry)})")
    reserved = sorted(({*entry} - {prompt}) & {*CANONICAL, KEY_COLUMN})
    if reserved:
        raise DataError(f"the field {reserved[0]!r} is a column of AsyncFlow's own; rename it")
    value = entry.pop(prompt)
    _check_prompt(value, prompt)
    return _Line(place, value, entry)


def _check_prompt(value: Any, prompt: str) -> None:
    if isinstance(value, str):
        if not value:
            raise DataError(f"the field {prompt!r} is empty")
        return
    if not isinstance(value, list):
        raise DataError(f"the field {prompt!r} is {type(value).__name__}, not text or messages")
    if not value:
        raise DataError(f"the field {prompt!r} has no messages")
    for number, message in enumerate(value, 1):
        whole = isinstance(message, dict) and {"role", "content"} <= message.keys()
        if not whole or not all(isinstance(part, str) for part in message.values()):
            raise DataError(f"message {number} of {prompt!r} needs a role and a content, as text")


def _distinct(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"duplicate field {twice!r}")
    return entry


def _refuse_constant(name: str) -> float:
    raise DataError(f"{name} is not JSON")
