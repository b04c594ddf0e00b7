"""Conformance of a WeightSync; `docs/spec/weight_sync.md` has the clauses.

A plugin's contract test subclasses `WeightSyncTests` and gives the fixtures.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from asyncflow_core.errors import AsyncFlowError, DataError, ServiceClosedError, ServiceError
from asyncflow_core.services.weight_sync import (
    Bucket,
    Checksum,
    PublishedWeights,
    TensorSpec,
    WeightSync,
    WeightSyncCapabilities,
)
from asyncflow_core.testing.aio import collect, eventually, manifest_of, requires, stream

__all__ = ["WeightSyncTests", "random_buckets"]


def random_buckets(version: int) -> list[Bucket]:
    """Three buckets of several dtypes, odd offsets and an alias; other values each version."""
    rng = np.random.default_rng(version)
    buckets = []
    for number, dtypes in enumerate((("F32", "BF16"), ("I64",), ("U8", "F64"))):
        specs, offset = [], number  # a gap in front
        for dtype in dtypes:
            name = f"model.layers.{number}.{dtype.lower()}.weight"
            aliases = ("lm_head.weight",) if dtype == "I64" else ()
            specs.append(TensorSpec(name, dtype, (3, 5 + number), offset, aliases))
            offset += specs[-1].nbytes
        buckets.append(Bucket(tuple(specs), rng.integers(0, 256, offset, np.uint8)))
    return buckets


async def reused(buckets: list[Bucket]) -> AsyncIterator[Bucket]:
    """The buckets through one buffer that is overwritten, as `export_weights` may do."""
    buffer = np.empty(max(len(bucket.data) for bucket in buckets), np.uint8)
    for bucket in buckets:
        view = buffer[: len(bucket.data)]
        view[...] = bucket.data
        yield Bucket(bucket.specs, view)
        buffer[...] = 0xFF


class WeightSyncTests:
    """Give `service` (the publishing side), `replica` (the other), both opened; `unopened`."""

    @pytest.fixture
    async def service(self) -> WeightSync:
        raise NotImplementedError("give an opened WeightSync, the trainer's side")

    @pytest.fixture
    async def replica(self) -> WeightSync:
        raise NotImplementedError("give an opened WeightSync, the replica's side")

    @pytest.fixture
    def unopened(self) -> WeightSync:
        raise NotImplementedError("give a WeightSync that was not opened")

    @pytest.fixture
    def capabilities(self) -> WeightSyncCapabilities:
        raise NotImplementedError("give the record the plugin registers")

    async def checksum(self, replica: WeightSync, published: PublishedWeights) -> str:
        """Over what a replica receives."""
        source = await replica.fetch(published)
        assert source.manifest == published.manifest
        assert source.buckets is not None
        checksum = Checksum()
        async for bucket in source.buckets:
            for spec in bucket.specs:
                checksum.add(spec.name, spec.dtype, spec.shape, bucket.tensor_bytes(spec))
        return checksum.hexdigest()

    async def test_use_before_open_and_after_aclose_refused(self, unopened: WeightSync) -> None:
        """WS-1."""
        for _ in range(2):
            with pytest.raises(ServiceClosedError):
                await unopened.stats()
            with pytest.raises(ServiceClosedError):
                await unopened.publish(0, 0, stream(random_buckets(0)))
            await unopened.aclose()

    async def test_publish_manifest_is_of_the_buckets(self, service: WeightSync) -> None:
        """WS-2."""
        published = await service.publish(4, 2, reused(random_buckets(4)))
        assert published.manifest == manifest_of(random_buckets(4), 4, life=2)
        stats = await service.stats()
        assert (stats.versions, stats.bytes_published) == ((4,), published.manifest.nbytes)

    async def test_fetch_several_replicas_bit_equal(
        self, service: WeightSync, replica: WeightSync, capabilities: WeightSyncCapabilities
    ) -> None:
        """WS-3."""
        requires(capabilities.source == "buckets", "source: buckets")
        published = await service.publish(1, 0, reused(random_buckets(1)))
        for name in ("rollout-0", "rollout-1"):
            await replica.attach(name, published)
            assert await self.checksum(replica, published) == published.manifest.checksum

    async def test_locator_crosses_processes(self, service: WeightSync) -> None:
        """WS-4."""
        published = await service.publish(1, 0, stream(random_buckets(1)))
        assert msgpack.unpackb(msgpack.packb(published.locator)) == published.locator

    async def test_publish_source_fails_nothing_is_held(self, service: WeightSync) -> None:
        """WS-5; the version can be published again."""
        with pytest.raises(DataError, match="cut"):
            await service.publish(1, 0, stream(random_buckets(1)[:1], error=DataError("cut")))
        assert (await service.stats()).versions == ()
        await service.publish(1, 0, stream(random_buckets(1)))

    async def test_publish_faulty_buckets_refused(self, service: WeightSync) -> None:
        """WS-5."""
        first, *_ = random_buckets(1)
        outside = Bucket((replace(first.specs[0], offset=1 << 20),), first.data)
        for buckets in ([first, first], [outside]):
            with pytest.raises(DataError):
                await service.publish(1, 0, stream(buckets))
        assert (await service.stats()).versions == ()

    async def test_publish_held_version_refused(self, service: WeightSync) -> None:
        """WS-6."""
        await service.publish(1, 0, stream(random_buckets(1)))
        with pytest.raises(ServiceError):
            await service.publish(1, 0, stream(random_buckets(1)))

    async def test_publish_full_waits_until_one_is_retired(
        self, service: WeightSync, replica: WeightSync, capabilities: WeightSyncCapabilities
    ) -> None:
        """WS-7."""
        count = capabilities.concurrent_versions
        published = [await service.publish(v, 0, stream(random_buckets(v))) for v in range(count)]
        waiting = asyncio.ensure_future(service.publish(count, 0, stream(random_buckets(count))))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        await service.retire(0)
        await waiting
        assert (await service.stats()).versions == tuple(range(1, count + 1))
        with pytest.raises(AsyncFlowError):
            await replica.attach("rollout-0", published[0])

    async def test_publish_cancelled_leaves_it_usable(
        self, service: WeightSync, capabilities: WeightSyncCapabilities
    ) -> None:
        """WS-7."""
        started, never = asyncio.Event(), asyncio.Event()

        async def stuck() -> AsyncIterator[Bucket]:
            yield random_buckets(1)[0]
            started.set()
            await never.wait()

        task = asyncio.ensure_future(service.publish(1, 0, stuck()))
        await eventually(started.is_set)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await service.stats()).versions == ()
        await service.publish(1, 0, stream(random_buckets(1)))

    async def test_fetch_counts_bytes(self, service: WeightSync, replica: WeightSync) -> None:
        """WS-8."""
        published = await service.publish(1, 0, stream(random_buckets(1)))
        source = await replica.fetch(published)
        if source.buckets is not None:
            await collect(source.buckets)
        assert (await replica.stats()).bytes_fetched >= published.manifest.nbytes

    async def test_retire_unknown_version_is_no_error(self, service: WeightSync) -> None:
        """WS-9."""
        await service.retire(99)
