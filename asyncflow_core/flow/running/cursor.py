"""The place in the training prompts: one after another, and back to those drawn before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from asyncflow_core.batch import GroupKey
from asyncflow_core.errors import ConfigError, DataError
from asyncflow_core.flow.running.assigned import TRAINING
from asyncflow_core.parts import PromptRecord, Prompts

__all__ = ["PromptCursor", "fingerprint"]


def fingerprint(prompt_ids: Any) -> str:
    """Equal for equal prompts: tells whether a resumed run has the prompts it had."""
    ids = np.asarray(prompt_ids, "<i8")
    return hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()


class PromptCursor:
    """Draws prompts epoch by epoch.

    Not thread-safe; whoever uses it calls it from one thread at a time.
    """

    def __init__(
        self, prompts: Prompts, plugin: str, *, at: tuple[int, int] = (0, 0), last: str = ""
    ) -> None:
        """Begin at a place.

        Args:
            prompts: where they come from.
            plugin: its name, for errors.
            at: (epoch, sequence) of the first prompt to draw.
            last: fingerprint of the prompt before it in its epoch; empty where it is not known.
        """
        self._prompts = prompts
        self._plugin = plugin
        self._at = at
        self._last = last
        self._records: Iterator[tuple[GroupKey, PromptRecord]] | None = None

    def draw(self, count: int) -> list[tuple[GroupKey, PromptRecord]]:
        """The next prompts.

        Raises:
            DataError: an epoch has none.
            ConfigError: the prompts are not those that the run began with.
        """
        if self._records is None:
            self._records = self._from(*self._at)
        return list(islice(self._records, count))

    def again(self, keys: Iterable[GroupKey]) -> dict[GroupKey, PromptRecord]:
        """Prompts that were drawn before.

        Raises:
            ConfigError: they are not those that the run began with.
        """
        wanted: dict[int, set[int]] = {}
        for key in keys:
            wanted.setdefault(key.epoch, set()).add(key.sequence)
        found = {}
        for epoch, sequences in wanted.items():
            last = max(sequences)
            for sequence, record in enumerate(islice(self._prompts.train(epoch), last + 1)):
                self._check(epoch, sequence, record)
                if sequence in sequences:
                    found[GroupKey(TRAINING, epoch, sequence)] = record
            if GroupKey(TRAINING, epoch, last) not in found:
                raise ConfigError(self._changed(f"epoch {epoch} has no prompt {last} any more"))
        return found

    def _from(self, epoch: int, first: int) -> Iterator[tuple[GroupKey, PromptRecord]]:
        while True:
            sequence = -1
            for sequence, record in enumerate(self._prompts.train(epoch)):
                self._check(epoch, sequence, record)
                if sequence >= first:
                    yield GroupKey(TRAINING, epoch, sequence), record
            if sequence < 0:
                raise DataError(
                    f"prompts plugin {self._plugin!r} has no training prompts in epoch {epoch}; "
                    f"check its options and what is held out"
                )
            if sequence < first - 1:
                raise ConfigError(self._changed(f"epoch {epoch} has {sequence + 1} prompts"))
            epoch, first = epoch + 1, 0

    def _check(self, epoch: int, sequence: int, record: PromptRecord) -> None:
        """Refuse another prompt than the last one drawn before."""
        drawn = (epoch, sequence + 1) == self._at and self._last
        if drawn and fingerprint(record.prompt_ids) != self._last:
            raise ConfigError(self._changed(f"prompt {sequence} of epoch {epoch} differs"))

    def _changed(self, how: str) -> str:
        return (
            f"prompts: they are not those that the run began with ({how}); bring them back, or "
            f"start another run"
        )
