"""A base for transports whose publisher holds a few versions, and waits for room."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

from asyncflow_core.errors import DataError, ServiceClosedError, ServiceError, ServiceTimeoutError
from asyncflow_core.services.weight_sync import (
    Bucket,
    PublishedWeights,
    WeightSync,
    WeightSyncStats,
)

__all__ = ["VersionedWeightSync"]

Key = tuple[int, int]
"""Version and life."""


class VersionedWeightSync(WeightSync):
    """Publishes one version after another and holds at most `versions` of them.

    A subclass takes a version in (`_take`), lets one go (`_drop`), attaches and fetches. Its `open`
    sets `_is_open`, its `aclose` calls `_closed`.

    Concurrency: publishes run one after another; a cancelled one leaves nothing behind.
    """

    transport: str
    """Its name in the configuration."""

    def __init__(self, name: str, *, versions: int, publish_timeout_s: float) -> None:
        """Start closed, without a version."""
        self._name = name
        self._versions = versions
        self._publish_timeout_s = publish_timeout_s
        self._is_open = False
        self._held: set[Key] = set()
        self._changed = asyncio.Event()
        self._publishing = asyncio.Lock()
        self._published = self._fetched = 0

    @abstractmethod
    async def _take(
        self, version: int, life: int, buckets: AsyncIterator[Bucket]
    ) -> PublishedWeights:
        """Take all buckets of a version in, or raise and leave nothing; they hold a tensor."""

    @abstractmethod
    async def _drop(self, key: Key) -> None:
        """Free a version that was taken in."""

    async def publish(
        self, version: int, life: int, buckets: AsyncIterator[Bucket]
    ) -> PublishedWeights:
        """Copy the buckets and make them fetchable; all of it, or an error and nothing.

        Raises:
            BackpressureError: there is no room for the bytes.
            DataError: a tensor outside its bucket, one that came twice, or none at all.
            ServiceTimeoutError: `versions` are held and none was retired in time.
        """
        start = time.monotonic()
        self._check_open()
        async with self._publishing:
            self._check_open()  # closed while an earlier one was published
            if (version, life) in self._held:
                raise self._error(f"version {version} (life {life}) is already published")
            await self._wait_for_room(version)
            # Closed here and not by the collector: a trainer may wait for the end of its export.
            async with contextlib.aclosing(_closed_at_the_end(version, buckets)) as source:
                published = await self._take(version, life, source)
            self._held.add((version, life))
        self._published += published.manifest.nbytes
        return replace(published, wall_s=time.monotonic() - start)

    async def _wait_for_room(self, version: int) -> None:
        try:
            async with asyncio.timeout(self._publish_timeout_s):
                while len(self._held) >= self._versions:
                    self._changed.clear()
                    await self._changed.wait()
                    self._check_open()
        except TimeoutError:
            held = ", ".join(str(v) for v in self._version_numbers())
            raise ServiceTimeoutError(
                f"publish of version {version} waited {self._publish_timeout_s:g} s for room: "
                f"versions {held} are held (at most {self._versions}) and none was retired; a "
                f"replica has not confirmed a newer one",
                service=self._name,
            ) from None

    async def retire(self, version: int, life: int = 0) -> None:
        """Take a version away; nothing happens if it is not held."""
        self._check_open()
        try:
            if (version, life) in self._held:
                self._held.discard((version, life))
                await self._drop((version, life))
        finally:
            self._changed.set()

    async def stats(self) -> WeightSyncStats:
        """Versions held, bytes moved by this side."""
        self._check_open()
        return WeightSyncStats(self._version_numbers(), self._published, self._fetched)

    def _version_numbers(self) -> tuple[int, ...]:
        return tuple(sorted({version for version, _ in self._held}))

    def _closed(self) -> None:
        """Forget everything; a publish that waits or runs fails with `ServiceClosedError`."""
        self._is_open = False
        self._held.clear()
        self._changed.set()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ServiceClosedError(
                f"weight_sync.{self.transport} is not open", service=self._name
            )

    def _check_transport(self, replica: str, published: PublishedWeights) -> None:
        if published.transport != self.transport:
            raise self._error(
                f"replica {replica!r} cannot attach to weights of the transport "
                f"{published.transport!r} by {self.transport!r}; use one transport on both sides"
            )

    def _error(self, message: str) -> ServiceError:
        return ServiceError(message, service=self._name)


async def _closed_at_the_end(
    version: int, buckets: AsyncIterator[Bucket]
) -> AsyncGenerator[Bucket, None]:
    """The buckets; `DataError` after the last if there was no tensor in them."""
    tensors = 0
    try:
        async for bucket in buckets:
            tensors += len(bucket.specs)
            yield bucket
        if not tensors:
            raise DataError(f"version {version} has no tensor; there is nothing to publish")
    finally:
        if isinstance(buckets, AsyncGenerator):
            await buckets.aclose()
