"""The smaller contracts beside the four services: tokenizers, prompts, stages.

They are built from a plugin's options and a `PartContext`; none of them sees the data store.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import Batch, Column

__all__ = [
    "KEY_COLUMN",
    "PartContext",
    "PromptRecord",
    "Prompts",
    "Stage",
    "StageContract",
    "Tokenizer",
    "encode_prompt",
    "group_index",
    "row_scorer",
]

KEY_COLUMN = "key"
"""Column every stage gets beside what it reads: int64 [B, 4], the fields of each row's Key."""


class Tokenizer(ABC):
    """Text to token ids and back. It is used at the edges only; between them ids travel."""

    eos_token_ids: tuple[int, ...]
    """Ids that end a response."""
    vocab_size: int
    """Ids are below this."""
    has_chat_template: bool = False
    """Whether `encode_chat` works."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with whatever the model wants in front of it."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Text of a response, without special tokens."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn."""
        raise NotImplementedError(f"{type(self).__name__} has no chat template")


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """One prompt.

    Attributes:
        prompt_ids: token ids.
        fields: further columns of the prompt's rows, one entry each ("answer", "entry", ...).
    """

    prompt_ids: Sequence[int]
    fields: Mapping[str, Any] = field(default_factory=dict)


class Prompts(ABC):
    """Where prompts come from. Equal options and seed give equal prompts in equal order."""

    fields: tuple[str, ...] = ()
    """Names of the columns beside `prompt_ids` that every record carries."""

    @abstractmethod
    def train(self, epoch: int) -> Iterator[PromptRecord]:
        """The prompts of one epoch, finite or not."""

    @abstractmethod
    def evaluation(self) -> Iterator[PromptRecord]:
        """Held-out prompts, never among `train`; finite, may be empty."""


class Stage(Protocol):
    """A step of the dataflow: reads columns, returns the columns it writes.

    Called with a batch of the contract's `reads` and `KEY_COLUMN`; returns a column, array or
    list of one entry a row for each of its `writes`. It runs on a worker thread or in a worker
    process, several batches at once only if several workers were asked for.
    """

    def __call__(self, batch: Batch) -> Mapping[str, Any]:
        """The written columns."""
        ...


@dataclass(frozen=True, slots=True)
class StageContract:
    """What a stage reads and writes.

    Attributes:
        reads: columns it needs. writes: columns it makes.
        whole_groups: it needs all rows of a prompt group at once.
        partitions: rows it works on; "eval" rows are held-out prompts.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    whole_groups: bool = False
    partitions: tuple[str, ...] = ("train",)


@dataclass(frozen=True, slots=True)
class PartContext:
    """What core gives to whatever a plugin builds.

    Attributes:
        name: of this instance in the run, as errors and logs name it: rollout-0, trainer-1 (rank
            1 of the trainer).
        seed: of the run.
        rank: among `world_size` ranks of one service.
        run_dir: private to the run (mode 0700), gone when the run ends; None outside a run.
        tokenizer: of the run, where one is configured.
        registry: the process's `asyncflow_core.registry.Registry`, for parts that build others (a
            trainer its losses); None stands for the installed plugins.
    """

    name: str = ""
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    run_dir: Path | None = None
    tokenizer: Tokenizer | None = None
    registry: Any = None


def encode_prompt(
    tokenizer: Tokenizer, prompt: str | Sequence[Mapping[str, str]], *, chat: bool | None = None
) -> list[int]:
    """Token ids of a prompt; the one place where a chat template is applied.

    Args:
        tokenizer: of the run.
        prompt: text, or messages with `role` and `content`.
        chat: wrap plain text as a user message; None where the tokenizer has a template.
    """
    if not isinstance(prompt, str):
        return tokenizer.encode_chat(prompt)
    if tokenizer.has_chat_template if chat is None else chat:
        return tokenizer.encode_chat([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt)


def group_index(batch: Batch) -> NDArray[np.int64]:
    """Number the prompt groups of a stage's batch from 0 in order of appearance; int64 [B]."""
    keys = batch[KEY_COLUMN].array[:, :3]
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(key.tobytes(), len(numbers)) for key in keys], np.int64)


def row_scorer(
    score: Callable[..., float], parameters: Sequence[str], tokenizer: Tokenizer | None
) -> Stage:
    """A reward stage from a function on one row.

    Writes `reward` and `reward_error`: a score that raises, or is not a finite number, counts 0
    and leaves its message there, with file and line of its own code, so that it is counted and
    shown instead of ending the run.

    Args:
        score: called with `parameters` by name; `prompt` and `response` are text, any other name
            is the entry of that column.
        parameters: names `score` takes.
        tokenizer: decodes `prompt` and `response`.
    """

    def stage(batch: Batch) -> Mapping[str, Any]:
        rewards = np.zeros(batch.rows, np.float32)
        errors: list[str | None] = []
        for row in range(batch.rows):
            try:
                arguments = {name: _argument(name, batch, row, tokenizer) for name in parameters}
                rewards[row] = _number(score(**arguments))
                errors.append(None)
            # A verifier's fault must not end the run, a task of its own that was cancelled neither.
            except (Exception, CancelledError) as error:  # noqa: BLE001
                said = f"{type(error).__name__}: {error}"[:300]
                errors.append(f"{said}{_place(error, score)}")
        return {"reward": rewards, "reward_error": Column.objects(errors)}

    return stage


def _place(error: BaseException, function: Callable[..., Any]) -> str:
    """File and line of a function's own code where it raised; empty where it has none."""
    code = getattr(function, "__code__", None)
    line, step = 0, error.__traceback__
    while step is not None and code is not None:
        if step.tb_frame.f_code.co_filename == code.co_filename:
            line = step.tb_lineno
        step = step.tb_next
    return f" ({os.path.basename(code.co_filename)}:{line})" if code is not None and line else ""


def _number(score: Any) -> float:
    try:
        value = float(score)
    except (TypeError, ValueError):
        raise TypeError(f"the score is {score!r:.100}, not a number") from None
    if not abs(value) <= float(np.finfo(np.float32).max):
        raise ValueError(f"the score is {value}, not a finite number of 32 bits")
    return value


def _argument(name: str, batch: Batch, row: int, tokenizer: Tokenizer | None) -> Any:
    if name in ("prompt", "response") and tokenizer is not None:
        return tokenizer.decode(batch[f"{name}_ids"][row])
    return batch[name][row]
