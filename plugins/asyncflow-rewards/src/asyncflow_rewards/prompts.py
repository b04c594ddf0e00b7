"""Prompts from reasoning-gym, with a held-out set that no seed or epoch ever trains on."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from asyncflow_core.errors import ConfigError, DataError
from asyncflow_core.parts import PartContext, PromptRecord, Prompts, Tokenizer, encode_prompt
from asyncflow_rewards import gym
from asyncflow_rewards.options import ReasoningGymPromptsOptions

__all__ = ["ReasoningGymPrompts", "prompts_faults"]

_log = logging.getLogger(__name__)

_SALT = b"asyncflow-split"  # changing it would train on what earlier runs held out
_POOL_SEED = 0
_EVALUATION_SEED = 1
_DEFAULT_SIZE = 500
# Draws for one prompt that is kept: what bounds a search when filters or repeats leave too few.
_DRAWS_PER_PROMPT = 20


@dataclass(frozen=True, slots=True)
class _Item:
    """A drawn prompt; `place` in [0, 1) is the hash of its text, below `holdout` if held out."""

    text: str
    place: float
    entry: dict[str, Any]


def _place(text: str) -> float:
    digest = hashlib.blake2b(text.encode(), digest_size=8, salt=_SALT).digest()
    return int.from_bytes(digest, "big") / 2**64


def _stream(*words: int) -> int:
    """A seed of its own for each tuple; below 2**31, as numpy takes seed + index in 32 bits."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8, salt=_SALT).digest()
    return int.from_bytes(digest, "big") % 2**31


def prompts_faults(options: ReasoningGymPromptsOptions) -> list[str]:
    """Every fault of the options that can be seen by drawing one entry."""
    faults, entry = gym.draw_faults(options.dataset, options.dataset_options)
    if faults:
        return faults
    faults = gym.template_faults(options.template, entry)
    verifier = gym.create(options.dataset, options.dataset_options).score_answer
    arrived = gym.restore(gym.plain(entry), options.dataset)
    before, after = (gym.verdict(verifier, entry["answer"], e) for e in (entry, arrived))
    if before != after:
        faults.append(
            f"entries of {options.dataset!r} do not survive the wire: the verifier gives their own "
            f"answer {before} before and {after} after; choose another dataset"
        )
    return faults


class ReasoningGymPrompts(Prompts):
    """Prompts of one reasoning-gym dataset. `answer` is text, `entry` what the verifier needs."""

    fields = ("answer", "entry")

    def __init__(self, options: ReasoningGymPromptsOptions, ctx: PartContext) -> None:
        """Check the options by drawing one entry.

        Raises:
            ConfigError: with every fault.
        """
        faults = prompts_faults(options)
        if ctx.tokenizer is None:
            faults.append("the prompts 'reasoning_gym' need a tokenizer; name one in the config")
        if faults or ctx.tokenizer is None:
            raise ConfigError(faults)
        self._options = options
        self._tokenizer: Tokenizer = ctx.tokenizer
        self._seed = ctx.seed
        self._pattern = re.compile(options.answer_pattern or ".*", re.DOTALL)
        self._pool: list[_Item] | None = None
        self._held_out: list[_Item] | None = None

    def train(self, epoch: int) -> Iterator[PromptRecord]:
        """The prompts of one epoch, all different; equal for equal (seed, epoch)."""
        kept, options = 0, self._options
        limit = options.size
        if limit is None and options.pool_size is None:
            limit = _DEFAULT_SIZE
        for item in islice(self._train_items(epoch, limit), limit):
            kept += 1
            yield self._record(item)
        if not kept:
            raise DataError(f"no prompt of {options.dataset!r} is left: {self._filters()}")
        if kept < (limit or 0):
            _log.warning("epoch %d has %d of %d prompts: %s", epoch, kept, limit, self._filters())

    def evaluation(self) -> Iterator[PromptRecord]:
        """Held-out prompts, all different, in an order that no seed changes."""
        if self._held_out is None:
            self._held_out = self._find_held_out()
        return (self._record(item) for item in self._held_out)

    def _train_items(self, epoch: int, limit: int | None) -> Iterator[_Item]:
        seed, holdout = _stream(self._seed, epoch), self._options.holdout
        if self._options.pool_size is None:
            drawn = self._draw(seed, (limit or _DEFAULT_SIZE) * _DRAWS_PER_PROMPT)
            return (item for item in drawn if item.place >= holdout)
        pool = [item for item in self._pooled() if item.place >= holdout]
        return (pool[index] for index in np.random.default_rng(seed).permutation(len(pool)))

    def _find_held_out(self) -> list[_Item]:
        holdout, size = self._options.holdout, self._options.evaluation_size
        if not holdout:
            return []
        if self._options.pool_size is not None:
            held = [item for item in self._pooled() if item.place < holdout]
            return sorted(held, key=lambda item: item.place)[:size]
        found: list[_Item] = []
        for item in self._draw(_EVALUATION_SEED, int(size / holdout * _DRAWS_PER_PROMPT)):
            if item.place < holdout:
                found.append(item)
            if len(found) == size:
                break
        return found

    def _pooled(self) -> list[_Item]:
        if self._pool is None:
            assert self._options.pool_size is not None, "only called with a pool"
            self._pool = list(self._draw(_POOL_SEED, self._options.pool_size))
        return self._pool

    def _draw(self, seed: int, draws: int) -> Iterator[_Item]:
        """What passes the filters of these draws, without repeats."""
        options = self._options
        dataset = gym.create(options.dataset, options.dataset_options, seed=seed, size=draws)
        seen: set[str] = set()
        for number in range(draws):
            entry = dataset[number]
            text = options.template.format(**entry)
            if text not in seen and self._fits(text, entry):
                seen.add(text)
                yield _Item(text, _place(text), entry)

    def _fits(self, text: str, entry: dict[str, Any]) -> bool:
        longest = self._options.max_prompt_chars
        if longest is not None and len(text) > longest:
            return False
        return self._pattern.fullmatch(_answer(entry)) is not None

    def _filters(self) -> str:
        shown = ("pool_size", "holdout", "max_prompt_chars", "answer_pattern")
        return ", ".join(f"{name} {getattr(self._options, name)}" for name in shown)

    def _record(self, item: _Item) -> PromptRecord:
        ids = encode_prompt(self._tokenizer, item.text, chat=self._options.chat)
        entry = gym.plain(item.entry)
        entry["metadata"].setdefault("source_dataset", self._options.dataset)
        return PromptRecord(ids, {"answer": _answer(item.entry), "entry": entry})


def _answer(entry: dict[str, Any]) -> str:
    """Text of the answer; "" for datasets that have none but judge by rules."""
    return "" if entry["answer"] is None else str(entry["answer"])
