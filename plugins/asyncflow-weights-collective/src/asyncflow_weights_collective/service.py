"""The WeightSync service over torch.distributed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np

from asyncflow_core.errors import DataError, ServiceError
from asyncflow_core.parts import PartContext
from asyncflow_core.services.versioned import VersionedWeightSync
from asyncflow_core.services.weight_sync import (
    Bucket,
    ManifestBuilder,
    PublishedWeights,
    WeightSource,
)
from asyncflow_weights_collective.group import Membership, Place, connect, dist
from asyncflow_weights_collective.options import CollectiveOptions
from asyncflow_weights_collective.sender import Held, Sender, ask, version_key

__all__ = ["CollectiveWeightSync"]

_T = TypeVar("_T")


class CollectiveWeightSync(VersionedWeightSync):
    """One side of the transport. The publisher holds its versions in host memory.

    A fetch waits for its group to form, which takes `gather_s`; the rollout joins it.
    """

    transport = "collective"

    def __init__(self, options: CollectiveOptions, ctx: PartContext) -> None:
        """Keep the arguments."""
        super().__init__(
            ctx.name or "collective",
            versions=options.versions,
            publish_timeout_s=options.publish_timeout_s,
        )
        self._options = options
        self._mine: dict[str, Held] = {}
        self._served: asyncio.Future[tuple[Any, Sender]] | None = None

    async def open(self) -> None:
        """Take calls; the store is made by the first publish."""
        self._is_open = True

    async def aclose(self) -> None:
        """Stop to answer; broadcasts under way end by their deadline."""
        self._closed()
        served, self._served = self._served, None
        self._mine.clear()
        if served is not None:
            await asyncio.wait([served])  # also one that is only being made, or it would be left
            if served.exception() is None:
                await asyncio.to_thread(served.result()[1].stop)

    async def _serving(self) -> Any:
        """The store; made once, by whoever asks first and even if that one is cancelled."""
        if self._served is None:
            self._served = asyncio.ensure_future(asyncio.to_thread(self._serve))
        served = self._served
        try:
            store, _ = await asyncio.shield(served)
        except dist.DistError:
            if self._served is served:
                self._served = None
            raise
        return store

    def _serve(self) -> tuple[Any, Sender]:
        options = self._options
        limit = timedelta(seconds=options.timeout_s)
        store = dist.TCPStore(
            options.host, 0, is_master=True, timeout=limit, wait_for_workers=False
        )
        member = Membership(
            options.backend, options.host, store.port, "", 0, 1, options.timeout_s, ()
        )
        sender = Sender(member, self._mine.get, gather_s=options.gather_s)
        sender.start()
        return store, sender

    async def _take(
        self, version: int, life: int, buckets: AsyncIterator[Bucket]
    ) -> PublishedWeights:
        store = await self._serving()
        self._check_open()
        builder, buffers, places, count = ManifestBuilder(version, life), [], [], 0
        async for bucket in buckets:
            data = np.empty(len(bucket.data), np.uint8)
            await asyncio.to_thread(_copy, builder, bucket, data)
            tensors = tuple((count + n, spec.offset) for n, spec in enumerate(bucket.specs))
            count += len(tensors)
            buffers.append(data)
            places.append(Place(len(data), tensors))
        self._check_open()
        key = version_key(version, life)
        self._mine[key] = Held(buffers, tuple(places))
        store.set(f"held/{key}", "yes")
        locator = {"host": self._options.host, "port": store.port}
        return PublishedWeights(builder.build(), "collective", locator)

    async def _drop(self, key: tuple[int, int]) -> None:
        self._mine.pop(version_key(*key), None)
        (await self._serving()).delete_key(f"held/{version_key(*key)}")

    async def attach(self, replica: str, published: PublishedWeights) -> None:
        """Check that the publisher answers and holds the version.

        Raises:
            ServiceError: another transport, no answer, or the version is retired.
        """
        self._check_open()
        self._check_transport(replica, published)
        key = version_key(published.manifest.version, published.manifest.life)
        held = await self._with_store(published, lambda store: store.check([f"held/{key}"]))
        if not held:
            raise self._error(f"replica {replica!r} comes too late: version {key} is retired")

    async def fetch(self, published: PublishedWeights) -> WeightSource:
        """How to join the group that gets the version; join it at once.

        Raises:
            ServiceError: the publisher does not answer in time, or the version is retired.
        """
        self._check_open()
        manifest = published.manifest
        key = version_key(manifest.version, manifest.life)
        membership = await self._with_store(published, lambda store: ask(store, key))
        if membership is None:
            raise self._error(f"version {key} is retired")
        self._fetched += manifest.nbytes
        return WeightSource(manifest, collective=membership)

    async def _with_store(self, published: PublishedWeights, call: Callable[[Any], _T]) -> _T:
        where: Any = published.locator
        host, port = where.get("host"), where.get("port")
        if not isinstance(host, str) or not isinstance(port, int):
            raise DataError(f"not a locator of the transport 'collective': {where!r:.80}")

        def connected() -> _T:
            return call(connect(host, port, self._options.timeout_s))

        try:
            return await asyncio.to_thread(connected)
        except dist.DistError as error:
            raise ServiceError(
                f"the publisher of version {published.manifest.version} at {host}:{port} does not "
                f"answer within {self._options.timeout_s:g} s: {error}",
                service=self._name,
            ) from error


def _copy(builder: ManifestBuilder, bucket: Bucket, data: Any) -> None:
    builder.add(bucket, into=data)
