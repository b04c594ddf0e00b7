"""What a run says of its rows: samples, and the rewards of each batch."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import Batch, GroupKey, Key
from asyncflow_core.errors import DataError
from asyncflow_core.parts import Tokenizer
from asyncflow_core.services.data_store import RowInfo

__all__ = ["Folder", "Recorder", "Rewards"]


_REMEMBERED = 8192
"""Groups whose step is recorded: rows of theirs may still come again, under a later lease."""


@dataclass(slots=True)
class Rewards:
    """Rewards of one group or one evaluation; `seen` has the rows they are of."""

    seen: set[Key] = field(default_factory=set)
    values: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: int = 0
    first_error: str = ""
    last_at: float = 0.0
    """When the last row was seen, `time.perf_counter`."""
    oldest: int | None = None
    newest: int | None = None

    @property
    def failed(self) -> bool:
        """Whether there are rewards, and none that its function gave."""
        return 0 < len(self.values) == self.errors

    def add(self, other: Rewards) -> None:
        """Take another's rewards in; of which rows they are is forgotten."""
        self.values += other.values
        self.tokens += other.tokens
        self.errors += other.errors
        self.first_error = self.first_error or other.first_error
        self.last_at = max(self.last_at, other.last_at)

    def made_at(self, versions: Sequence[int]) -> None:
        """Note which versions have a token in a row."""
        for version in versions:
            self.oldest = version if self.oldest is None else min(self.oldest, version)
            self.newest = version if self.newest is None else max(self.newest, version)


class Folder(Protocol):
    """What takes the samples."""

    def append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Add lines of JSON to a file."""


class Recorder:
    """Sees every rewarded row, training and evaluation; writes it down and counts it, once.

    Evaluation rows are told apart by having no batch; the epoch of their key numbers evaluations.

    Concurrency: rows are made readable and written on a thread, for long ones take their time.
    """

    def __init__(
        self,
        folder: Folder,
        tokenizer: Tokenizer | None,
        thread: Executor,
        *,
        first_batch: int = 0,
    ) -> None:
        """Write samples into `folder`; texts only where there is a tokenizer.

        Batches below `first_batch` were recorded in an earlier life of the run: a store that
        outlived it may not have heard of it.
        """
        self._first_batch = first_batch
        self._folder = folder
        self._tokenizer = tokenizer
        self._thread = thread
        self._changed = asyncio.Event()
        self.groups: defaultdict[GroupKey, Rewards] = defaultdict(Rewards)
        self._recorded: dict[GroupKey, None] = {}  # the oldest first
        self.evaluations: defaultdict[int, Rewards] = defaultdict(Rewards)

    async def observe(self, rows: Sequence[RowInfo], batch: Batch) -> None:
        """Take rewarded rows; those that were seen before, under a lease that was lost, are not."""
        new = [at for at, info in enumerate(rows) if self._is_new(info)]
        rows, batch = [rows[at] for at in new], batch.take(new)
        for info in rows:
            self._rewards(info).seen.add(info.key)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write, rows, batch)
        for info, reward, tokens, error in zip(
            rows,
            batch["reward"].array.tolist(),
            batch["response_ids"].lengths.tolist(),
            _errors(batch),
            strict=True,
        ):
            self._count(info, reward, tokens, error)
        for info, versions in zip(rows, batch["versions"], strict=True):
            self._rewards(info).made_at(versions[:, 0].tolist())
        self._changed.set()

    def _write(self, rows: Sequence[RowInfo], batch: Batch) -> None:
        prompts: dict[GroupKey, Any] = {}  # shared by a group, so decoded once
        records = []
        for info, prompt, response, reward, versions, reason, error in zip(
            rows,
            batch["prompt_ids"],
            batch["response_ids"],
            batch["reward"].array.tolist(),
            batch["versions"],
            batch["finish_reason"],
            _errors(batch),
            strict=True,
        ):
            if info.key.group not in prompts:
                prompts[info.key.group] = self._readable(prompt, info.key)
            record = {
                "key": str(info.key),
                "batch": info.batch,
                "prompt": prompts[info.key.group],
                "response": self._readable(response, info.key),
                "reward": reward,
                "versions": versions.tolist(),
                "finish_reason": reason,
            }
            records.append(record if error is None else {**record, "reward_error": error})
        self._folder.append("samples.jsonl", records)

    def _is_new(self, info: RowInfo) -> bool:
        if info.batch is not None and (
            info.batch < self._first_batch or info.key.group in self._recorded
        ):
            return False
        return info.key not in self._rewards(info).seen

    def _rewards(self, info: RowInfo) -> Rewards:
        if info.batch is None:
            return self.evaluations[info.key.epoch]
        return self.groups[info.key.group]

    def _count(self, info: RowInfo, reward: float, tokens: int, error: str | None) -> None:
        rewards = self._rewards(info)
        rewards.values.append(reward)
        rewards.tokens += tokens
        rewards.last_at = time.perf_counter()
        if error is not None:
            rewards.errors += 1
            rewards.first_error = rewards.first_error or error

    def _readable(self, ids: NDArray[np.int32], key: Key) -> Any:
        if self._tokenizer is None:
            return ids.tolist()
        try:
            return self._tokenizer.decode(ids)
        except Exception as error:
            raise DataError(
                f"row {key}: the tokenizer cannot decode {ids.tolist()}: {error}"
            ) from error

    async def wait_groups(self, groups: Sequence[GroupKey], rows: int) -> Rewards:
        """The rewards of training groups, once `rows` were seen; they are then forgotten."""
        while sum(len(self.groups[group].values) for group in groups) < rows:
            self._changed.clear()
            await self._changed.wait()
        found = Rewards()
        for group in groups:
            found.add(self.groups.pop(group))
            self._recorded[group] = None
        while len(self._recorded) > _REMEMBERED:
            del self._recorded[next(iter(self._recorded))]
        return found

    def forget(self, group: GroupKey) -> int:
        """A training group was dropped; response tokens that were seen of it."""
        return self.groups.pop(group, Rewards()).tokens

    def take_evaluation(self, version: int) -> Rewards:
        """What was seen of the evaluation of a version; it is then forgotten."""
        return self.evaluations.pop(version, Rewards())

    async def changed(self, timeout_s: float) -> None:
        """Wait until more rows are seen, or so long."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()


def _errors(batch: Batch) -> Iterable[str | None]:
    return batch["reward_error"] if "reward_error" in batch else [None] * batch.rows
