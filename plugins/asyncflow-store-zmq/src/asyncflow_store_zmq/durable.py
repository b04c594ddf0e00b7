"""What makes a controller's table outlive it: journal and memory files together.

Columns are in the shards' files before a record names them: a client copies into the mapped file
before it sends the message. `journal`: the record is written before the answer, so whatever
process dies, what was answered is there. `fsync`: the shards' files, then the record, are on the
disk before the answer; answers that wait share one turn of the disk.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncflow_core.errors import DataError, ServiceError
from asyncflow_store_zmq import snapshot
from asyncflow_store_zmq.arena import Arena
from asyncflow_store_zmq.handouts import Later
from asyncflow_store_zmq.history import Replay
from asyncflow_store_zmq.journal import Journal
from asyncflow_store_zmq.spec import StoreSpec
from asyncflow_store_zmq.table import Table

__all__ = ["Durable", "first_lease"]

_log = logging.getLogger(__name__)
_LIFE_BITS = 40
_DRAWN_BITS = 22
"""With those above, a signed number of 64 bits."""
_SHORTEN_BYTES = 64 << 20


def first_lease(spec: StoreSpec) -> int:
    """Apart from every lease number of an earlier life: above, by a file that counts lives.

    Without durability there is no file, and a store started again by hand draws another number.
    """
    if spec.durability == "none":
        return secrets.randbits(_DRAWN_BITS) << _LIFE_BITS
    path = Path(spec.directory) / "life"
    life = _life(path) + 1
    new = path.with_suffix(".new")
    with new.open("w") as file:
        file.write(str(life))
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    return life << _LIFE_BITS


def _life(path: Path) -> int:
    """Lives so far; 0 in a new directory."""
    if not path.exists():
        if not any(path.parent.glob("journal-*")):
            return 0
        text = "is missing beside a journal"
    else:
        text = path.read_text(errors="replace")
        if text.isascii() and text.isdigit():
            return int(text)
        text = f"holds {text[:20]!r} and no number"
    raise DataError(
        f"{path}, which counts the lives of the store, {text}; without it leases of an earlier "
        f"life could pass for new ones. Write a number above the number of starts so far into it"
    )


class Durable:
    """Reads the journal back, then writes it."""

    def __init__(
        self,
        spec: StoreSpec,
        table: Table,
        arenas: Sequence[Arena],
        sync_shards: Callable[[], Awaitable[None]],
    ) -> None:
        """Keep the arguments; `open` reads."""
        self._journal = Journal(Path(spec.directory))
        self._table = table
        self._arenas = arenas
        self._sync_shards = sync_shards
        self._fsync = spec.durability == "fsync"
        self._waiting: list[list[Any]] = []  # records not yet written
        self._turn: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._failed: ServiceError | None = None

    def open(self) -> None:
        """Make the table what the journal says; from here on everything is written down."""
        records, places = [], []
        for record in self._journal.read():
            records.append(record)
            places.append(self._journal.place)
        known: dict[int, int] = {}
        for record in records:
            if record[0] == "shards":
                known.update(enumerate(record[1]))
        here = [arena.identity for arena in self._arenas]
        lost = {
            number for number, identity in known.items() if here[number : number + 1] != [identity]
        }
        for number in sorted(lost):
            _log.warning("the memory of shard %d is gone; its rows are dropped", number)
        told = -1

        def tell() -> Iterator[list[Any]]:
            nonlocal told
            for told, record in enumerate(records):  # noqa: B007 - for the error
                yield record

        try:
            tops = [arena.top for arena in self._arenas]
            Replay(self._table, frozenset(lost)).run(tell(), tops)
        except Exception as error:
            place = places[told] if places else self._journal.place
            raise DataError(
                f"{place}: a record cannot be told again ({type(error).__name__}: {error}); it was "
                "written by another version of the store, or changed since"
            ) from error
        self._table.log = self._write
        # Else a death in between would leave a row that lives, in memory of another.
        self._table.pool.waits = self._fsync
        self._journal.rewrite([["shards", here], *snapshot.records(self._table)])

    async def aclose(self) -> None:
        """Write what waits."""
        if self._task is not None:
            await self._task
        self._journal.close()

    def _write(self, record: list[Any]) -> None:
        self._check()
        if self._fsync:
            self._waiting.append(record)
            return
        try:
            self._journal.append([record])
        except OSError as error:
            raise self._fail(error) from error

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _fail(self, cause: Exception) -> ServiceError:
        """From now on nothing counts: the table knows more than the journal."""
        self._failed = error = ServiceError(
            f"the journal of the store could not be written ({cause}), so what it does now would "
            "not be kept; make room on its disk and start it again: all it answered before is there"
        )
        error.__cause__ = cause
        _log.error("%s", error)
        return error

    def answer(self, value: Any) -> Any:
        """An answer, or with fsync a coroutine that gives it once the disk has what led to it.

        Raises:
            ServiceError: something could not be written before: nothing counts any more.
        """
        if self._failed is not None:
            if inspect.iscoroutine(value):
                value.close()
            elif isinstance(value, Later):
                value.cancel()
            raise self._failed
        if not self._fsync:
            if self._journal.nbytes > _SHORTEN_BYTES:
                self.shorten()
            return value
        if isinstance(value, Later) or inspect.iscoroutine(value):
            return self._answer_later(value)
        if self._waiting:
            return self._answer_synced(value)
        self._bury()
        return value

    async def _answer_later(self, value: Awaitable[Any]) -> Any:
        answer = await value
        try:
            return await self._answer_synced(answer)
        except asyncio.CancelledError:
            if isinstance(value, Later):
                value.cancel()
            raise

    async def _answer_synced(self, value: Any) -> Any:
        self._check()
        if self._waiting:
            if self._turn is None:
                self._turn = asyncio.get_running_loop().create_future()
            if self._task is None:
                self._task = asyncio.create_task(self._sync())
            await asyncio.shield(self._turn)
        else:
            self._bury()
        return value

    def _bury(self) -> None:
        """Let go of what nothing that waits for the disk speaks of."""
        if not self._waiting and self._task is None:
            self._table.pool.bury(self._table.pool.take_unburied())

    async def _sync(self) -> None:
        """One turn of the disk after another, as long as somebody waits."""
        while self._turn is not None:
            turn, self._turn = self._turn, None
            records, self._waiting = self._waiting, []
            dead = self._table.pool.take_unburied()
            try:
                await self._sync_shards()
                self._journal.append(records)
                await asyncio.to_thread(self._journal.sync)
            except Exception as error:  # noqa: BLE001 - whoever waits is told, and all who come
                failure = self._fail(error)
                for waiting in (turn, self._turn):
                    if waiting is not None:
                        waiting.set_exception(failure)
                return
            self._table.pool.bury(dead)
            turn.set_result(None)
        self._task = None

    def shorten(self) -> None:
        """Replace the journal by what the table holds."""
        here = [arena.identity for arena in self._arenas]
        if not self._waiting and self._task is None:
            self._journal.rewrite([["shards", here], *snapshot.records(self._table)])
