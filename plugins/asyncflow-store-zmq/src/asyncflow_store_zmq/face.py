"""The service face of the AsyncFlow paper: for pipelines that keep their own engines.

A pipeline registers its tasks, puts prompts, and each of its stages gets experience and puts what
it made of it. `Experiences` is for plain code, `AsyncExperiences` for an event loop.

Source: AsyncFlow (arXiv 2507.01663), user-level API.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from types import TracebackType
from typing import Any, NamedTuple, Self

from asyncflow_core.batch import Batch, GroupKey
from asyncflow_core.errors import DataError
from asyncflow_core.services.data_store import Lease, PutResult, Registration, TaskSpec
from asyncflow_core.wire import KeyPair
from asyncflow_store_zmq.blocking import BlockingStore
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

__all__ = ["AsyncExperiences", "Experience", "Experiences"]


class Experience(NamedTuple):
    """Rows of a task: their columns, and the lease that holds them."""

    lease: Lease
    batch: Batch


class _Sequence:
    """Keys for prompts that have none."""

    def __init__(self, source: int) -> None:
        self._source, self._next = source, 0

    def take(self, count: int) -> list[GroupKey]:
        start, self._next = self._next, self._next + count
        return [GroupKey(self._source, 0, number) for number in range(start, self._next)]

    def check(self, result: PutResult) -> None:
        """Refuse to go on where others have used the keys that were taken here."""
        if result.known:
            raise DataError(
                f"{result.known} of {result.stored + result.known} prompts were not stored: the "
                f"store has had others under the same keys of source {self._source}; give every "
                f"pipeline, and each of its lives, a `source` of its own, or its prompts `keys`"
            )


class Experiences:
    """Blocking. `source` numbers this pipeline's prompts; one source, one writer."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        name: str = "",
        source: int = 0,
        keys: str | PathLike[str] | None = None,
        reconnect_s: float = 0.0,
    ) -> None:
        """Where a store answers, its secret, and a key file if the address has a key.

        `reconnect_s` is how long a call waits for a store that died and is started again.
        """
        pair = None if keys is None else KeyPair.load(keys)
        self.store = BlockingStore(
            address, token=token, name=name, keys=pair, reconnect_s=reconnect_s
        )
        self._keys = _Sequence(source)

    def __enter__(self) -> Self:
        """Connect."""
        self.store.open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Disconnect."""
        self.store.close()

    def register(self, task: TaskSpec) -> None:
        """Announce a stage; before the prompts it is to see."""
        self.store.register(task)

    def put_prompts(
        self, prompts: Batch, *, samples: int = 1, keys: Sequence[GroupKey] | None = None
    ) -> Sequence[GroupKey]:
        """Store prompts, `samples` rows each; waits while the store is full. Their keys.

        Raises:
            DataError: as `DataStore.put`; or without `keys`, another pipeline has the same source.
        """
        if keys is not None:
            self.store.put(prompts, keys=keys, samples=samples)
            return keys
        keys = self._keys.take(prompts.rows)
        self._keys.check(self.store.put(prompts, keys=keys, samples=samples))
        return keys

    def get_experience(
        self, task: str, columns: Sequence[str], *, rows: int, wait_s: float = 60.0
    ) -> Experience | None:
        """Up to `rows` rows that are ready for a task; None if there are none for `wait_s`."""
        lease = self.store.lease(task, requester=task, limit_rows=rows, wait_s=wait_s)
        if lease is None:
            return None
        return Experience(lease, self.store.read(lease.ref(), columns))

    def put_experience(self, experience: Experience, columns: Batch | None = None) -> None:
        """The task is done with these rows; the columns it writes, a row for each."""
        self.store.commit(experience.lease.ref(), writes=columns)

    def notify_weights(self, version: int, note: Any = None) -> None:
        """Announce new weights to who waits in `wait_weights`."""
        self.store.notify_weights(version, note)

    def wait_weights(self, *, after: int, wait_s: float = 60.0) -> tuple[int, Any] | None:
        """The newest announced version above `after`, and its note."""
        return self.store.wait_weights(after=after, wait_s=wait_s)


class AsyncExperiences:
    """As `Experiences`, on an event loop; any number of calls at a time."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        name: str = "",
        source: int = 0,
        keys: str | PathLike[str] | None = None,
        reconnect_s: float = 0.0,
    ) -> None:
        """Where a store answers, its secret, and a key file if the address has a key.

        `reconnect_s` is how long a call waits for a store that died and is started again.
        """
        path = None if keys is None else fspath(keys)
        options = ZmqOptions(connect=address, token=token, keys=path, reconnect_s=reconnect_s)
        self.store = ZmqDataStore(options, name=name)
        self._keys = _Sequence(source)
        self._registrations: list[Registration] = []

    async def __aenter__(self) -> Self:
        """Connect."""
        await self.store.open()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Disconnect."""
        await self.store.aclose()

    async def register(self, task: TaskSpec) -> None:
        """Announce a stage; before the prompts it is to see."""
        self._registrations.append(await self.store.register(task))

    async def put_prompts(
        self, prompts: Batch, *, samples: int = 1, keys: Sequence[GroupKey] | None = None
    ) -> Sequence[GroupKey]:
        """Store prompts, `samples` rows each; waits while the store is full. Their keys.

        Raises:
            DataError: as `DataStore.put`; or without `keys`, another pipeline has the same source.
        """
        if keys is not None:
            await self.store.put(prompts, keys=keys, samples=samples)
            return keys
        keys = self._keys.take(prompts.rows)
        self._keys.check(await self.store.put(prompts, keys=keys, samples=samples))
        return keys

    async def get_experience(
        self, task: str, columns: Sequence[str], *, rows: int, wait_s: float = 60.0
    ) -> Experience | None:
        """Up to `rows` rows that are ready for a task; None if there are none for `wait_s`."""
        lease = await self.store.lease(task, requester=task, limit_rows=rows, wait_s=wait_s)
        if lease is None:
            return None
        return Experience(lease, await self.store.read(lease.ref(), columns))

    async def put_experience(self, experience: Experience, columns: Batch | None = None) -> None:
        """The task is done with these rows; the columns it writes, a row for each."""
        await self.store.commit(experience.lease.ref(), writes=columns)

    async def notify_weights(self, version: int, note: Any = None) -> None:
        """Announce new weights to who waits in `wait_weights`."""
        await self.store.notify_weights(version, note)

    async def wait_weights(self, *, after: int, wait_s: float = 60.0) -> tuple[int, Any] | None:
        """The newest announced version above `after`, and its note."""
        return await self.store.wait_weights(after=after, wait_s=wait_s)
