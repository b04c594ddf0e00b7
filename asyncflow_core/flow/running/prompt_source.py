"""What a prompts plugin is asked for, on a thread of its own; its faults name it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from itertools import islice
from typing import TypeVar

import numpy as np

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.errors import AsyncFlowError, DataError, ServiceError
from asyncflow_core.flow.building import described
from asyncflow_core.flow.processes.waits import WORTH_S
from asyncflow_core.flow.running.cursor import PromptCursor
from asyncflow_core.parts import PromptRecord, Prompts

__all__ = ["PromptSource"]

T = TypeVar("T")


class PromptSource:
    """Training prompts one after another, and held-out ones.

    Concurrency: a plugin may take its time, and the event loop serves every process. So each call
    of the plugin is made on the thread, one at a time.
    """

    def __init__(
        self,
        prompts: Prompts,
        plugin: str,
        thread: Executor,
        *,
        at: tuple[int, int] = (0, 0),
        last: str = "",
    ) -> None:
        """Take a plugin's prompts, its name for errors, and the place, as `PromptCursor`."""
        self._prompts = prompts
        self._plugin = plugin
        self._thread = thread
        self._cursor = PromptCursor(prompts, plugin, at=at, last=last)
        self._asked: float | None = None

    async def draw(self, count: int) -> list[tuple[GroupKey, PromptRecord]]:
        """The next training prompts."""
        return await self._aside(lambda: self._cursor.draw(count))

    async def again(self, keys: Iterable[GroupKey]) -> dict[GroupKey, PromptRecord]:
        """Training prompts that were drawn before."""
        return await self._aside(lambda: self._cursor.again(keys))

    async def held_out(self, limit: int) -> list[PromptRecord]:
        """The held-out prompts, at most so many."""
        return await self._aside(lambda: list(islice(self._prompts.evaluation(), limit)))

    def columns(self, records: Sequence[PromptRecord]) -> Batch:
        """What is put of prompts.

        Raises:
            DataError: a record is not one.
        """
        try:
            columns = {"prompt_ids": Column.ragged([r.prompt_ids for r in records], np.int32)}
            for name in self._prompts.fields:
                columns[name] = Column.objects(record.fields[name] for record in records)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise DataError(
                f"prompts plugin {self._plugin!r} yields a malformed PromptRecord: "
                f"{type(error).__name__}: {error}"
            ) from error
        return Batch(columns)

    def waiting(self) -> list[str]:
        """What is waited for here, a line each, for the wait-for graph."""
        since = 0.0 if self._asked is None else asyncio.get_running_loop().time() - self._asked
        if since < WORTH_S:
            return []
        return [f"prompts: plugin {self._plugin!r} has not answered since {since:.0f} s"]

    async def _aside(self, call: Callable[[], T]) -> T:
        """What the plugin makes; its own exceptions name it."""

        def named() -> T:
            try:
                return call()
            except AsyncFlowError:
                raise
            except BaseException as error:  # on its thread, whatever it is
                raise ServiceError(
                    f"prompts plugin {self._plugin!r} failed: {described(error)}",
                    service="prompts",
                ) from error

        loop = asyncio.get_running_loop()
        asked = self._asked = loop.time()
        try:
            return await loop.run_in_executor(self._thread, named)
        finally:
            if self._asked == asked:
                self._asked = None
