"""Weights inside one process: published versions lie in this module, copied once."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

from asyncflow_core.errors import ServiceError
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import NoOptions
from asyncflow_core.services.versioned import VersionedWeightSync
from asyncflow_core.services.weight_sync import (
    Bucket,
    ManifestBuilder,
    PublishedWeights,
    WeightManifest,
    WeightSource,
    WeightSyncCapabilities,
)

__all__ = ["MEMORY_WEIGHT_SYNC", "MemoryWeightSync"]

_TRANSPORT = "memory"

MEMORY_WEIGHT_SYNC = WeightSyncCapabilities(
    localities=frozenset({"process"}), source="buckets", concurrent_versions=2
)


@dataclass(frozen=True, slots=True)
class _Held:
    manifest: WeightManifest
    buckets: tuple[Bucket, ...]


# The two sides are two objects of one process, which meet here by the number in the locator.
_held: dict[int, _Held] = {}
_numbers = itertools.count()


class MemoryWeightSync(VersionedWeightSync):
    """Either side. The publishing one owns the copies, until `retire` or `aclose`."""

    transport = _TRANSPORT

    def __init__(self, options: NoOptions, ctx: PartContext) -> None:
        """Keep the name; there are no options."""
        most = MEMORY_WEIGHT_SYNC.concurrent_versions
        super().__init__(ctx.name or "memory", versions=most, publish_timeout_s=math.inf)
        self._mine: dict[tuple[int, int], int] = {}

    async def open(self) -> None:
        """Take calls."""
        self._is_open = True

    async def aclose(self) -> None:
        """Free every version this side published; a publish that waits is refused."""
        self._closed()
        for number in self._mine.values():
            _held.pop(number, None)
        self._mine.clear()

    async def _take(
        self, version: int, life: int, buckets: AsyncIterator[Bucket]
    ) -> PublishedWeights:
        builder, copies = ManifestBuilder(version, life), []
        async for bucket in buckets:
            data = bucket.data.copy()
            data.flags.writeable = False
            copies.append(Bucket(bucket.specs, data))
            builder.add(copies[-1])
        self._check_open()
        manifest, number = builder.build(), next(_numbers)
        _held[number] = _Held(manifest, tuple(copies))
        self._mine[version, life] = number
        return PublishedWeights(manifest, _TRANSPORT, {"pid": os.getpid(), "number": number})

    async def _drop(self, key: tuple[int, int]) -> None:
        _held.pop(self._mine.pop(key), None)

    async def attach(self, replica: str, published: PublishedWeights) -> None:
        """Check that the weights lie in this process and are still held."""
        self._check_open()
        self._find(published, f"replica {replica!r}")

    async def fetch(self, published: PublishedWeights) -> WeightSource:
        """The buckets, read-only and uncopied; they stay valid after `retire`."""
        self._check_open()
        held = self._find(published, self._name)
        return WeightSource(held.manifest, buckets=self._buckets(held))

    async def _buckets(self, held: _Held) -> AsyncIterator[Bucket]:
        for bucket in held.buckets:
            self._fetched += bucket.data.nbytes
            yield bucket

    def _find(self, published: PublishedWeights, who: str) -> _Held:
        where = published.locator
        what = f"version {published.manifest.version} of life {published.manifest.life}"
        if published.transport != _TRANSPORT or where.get("pid") != os.getpid():
            raise ServiceError(
                f"{who} cannot reach {what}: it was published over {published.transport!r} in "
                f"process {where.get('pid')}, this is process {os.getpid()}; choose a weight_sync "
                f"that reaches other processes",
                service=self._name,
            )
        held = _held.get(where["number"])
        if held is None:
            raise ServiceError(f"{who} comes too late: {what} is retired", service=self._name)
        return held
