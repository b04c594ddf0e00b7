"""Conformance of a WeightSync; `docs/spec/weight_sync.md` has the clauses.

A plugin's contract test subclasses `WeightSyncTests` and gives the fixtures.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest

from asyncflow_core.errors import AsyncFlowError, DataError, ServiceClosedError, ServiceError
from asyncflow_core.services.weight_sync import (
    Bucket,
    Checksum,
    PublishedWeights,
    SupportsOverlappedFetch,
    TensorSpec,
    WeightSource,
    WeightSync,
    WeightSyncCapabilities,
)
from asyncflow_core.testing.aio import eventually, manifest_of, requires, stream

__all__ = ["WeightSyncTests", "random_buckets", "read_directory"]


def random_buckets(version: int) -> list[Bucket]:
    """Three buckets of several dtypes, odd offsets and a tied name; other values each version."""
    rng = np.random.default_rng(version)
    buckets = []
    for number, dtypes in enumerate((("F32", "BF16"), ("I64", "F8_E4M3"), ("U8", "F64"))):
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


def read_directory(path: Path) -> Iterator[Bucket]:
    """The tensors of a directory of safetensors files, read here and not by what is under test."""
    for file in sorted(path.glob("*.safetensors")):
        raw = np.fromfile(file, np.uint8)
        start = 8 + int(raw[:8].view("<u8")[0])
        header = json.loads(raw[8:start].tobytes())
        header.pop("__metadata__", None)
        specs = [
            TensorSpec(name, entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][0])
            for name, entry in header.items()
        ]
        yield Bucket(tuple(specs), raw[start:])


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

    async def receive(self, source: WeightSource) -> AsyncIterator[Bucket]:
        """What comes out of a source; to be overridden where it is a collective."""
        if source.path is not None:
            for bucket in read_directory(Path(source.path)):
                yield bucket
            return
        assert source.buckets is not None
        async for bucket in source.buckets:
            yield bucket

    async def checksum(self, replica: WeightSync, published: PublishedWeights) -> str:
        """Over what a replica receives."""
        source = await replica.fetch(published)
        assert source.manifest == published.manifest
        return await self.checksum_of(source)

    async def checksum_of(self, source: WeightSource) -> str:
        """Over what comes out of a source."""
        checksum = Checksum()
        async for bucket in self.receive(source):
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

    async def test_aclose_after_use_frees_all_and_refuses_every_call(
        self, service: WeightSync, replica: WeightSync
    ) -> None:
        """WS-1."""
        published = await service.publish(1, 0, stream(random_buckets(1)))
        await replica.attach("rollout-0", published)
        for _ in range(2):
            await service.aclose()
            for call in (
                service.publish(2, 0, stream(random_buckets(2))),
                service.attach("rollout-0", published),
                service.fetch(published),
                service.retire(1),
                service.stats(),
            ):
                with pytest.raises(ServiceClosedError):
                    await call
        with pytest.raises(ServiceError):
            await replica.attach("rollout-1", published)

    async def test_aclose_ends_publishes_that_wait(
        self, service: WeightSync, capabilities: WeightSyncCapabilities
    ) -> None:
        """WS-1; one that waits for room, and one behind it."""
        count = capabilities.concurrent_versions
        for version in range(count):
            await service.publish(version, 0, stream(random_buckets(version)))
        waiting = [
            asyncio.ensure_future(service.publish(version, 0, stream(random_buckets(version))))
            for version in (count, count + 1)
        ]
        done, _ = await asyncio.wait(waiting, timeout=0.05)
        assert not done
        await service.aclose()
        for publish in waiting:
            with pytest.raises(ServiceClosedError):
                await asyncio.wait_for(publish, 10)
        await service.aclose()

    async def test_aclose_ends_who_waits_for_a_coming_version(
        self, service: WeightSync, capabilities: WeightSyncCapabilities
    ) -> None:
        """WS-1, WS-13."""
        requires(capabilities.overlapped_fetch, "overlapped_fetch: True")
        assert isinstance(service, SupportsOverlappedFetch)
        waiting = asyncio.ensure_future(service.coming(1, 0))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        await service.aclose()
        with pytest.raises(ServiceClosedError):
            await asyncio.wait_for(waiting, 10)
        with pytest.raises(ServiceClosedError):
            await service.coming(1, 0)

    async def test_attach_to_another_transport_refused(
        self, service: WeightSync, replica: WeightSync
    ) -> None:
        """WS-14."""
        published = await service.publish(1, 0, stream(random_buckets(1)))
        with pytest.raises(ServiceError):
            await replica.attach("rollout-0", replace(published, transport="no-such"))

    async def test_publish_manifest_is_of_the_buckets(self, service: WeightSync) -> None:
        """WS-2."""
        published = await service.publish(4, 2, reused(random_buckets(4)))
        assert published.manifest == manifest_of(random_buckets(4), 4, life=2)
        stats = await service.stats()
        assert (stats.versions, stats.bytes_published) == ((4,), published.manifest.nbytes)

    async def test_fetch_several_replicas_bit_equal(
        self, service: WeightSync, replica: WeightSync
    ) -> None:
        """WS-3."""
        published = await service.publish(1, 0, reused(random_buckets(1)))
        for name in ("rollout-0", "rollout-1"):
            await replica.attach(name, published)
            assert await self.checksum(replica, published) == published.manifest.checksum

    async def test_tensors_of_any_size_arrive_with_all_their_names(
        self, service: WeightSync, replica: WeightSync
    ) -> None:
        """WS-3; scalars, tensors without elements, and a bucket of nothing else."""
        empty = TensorSpec("empty", "F32", (0, 3), 0, ("also.empty",))
        buckets = [
            Bucket((replace(empty, name="alone", aliases=()),), np.empty(0, np.uint8)),
            *random_buckets(1),
            Bucket((TensorSpec("scalar", "F64", ()), empty), np.arange(8, dtype=np.uint8)),
        ]
        published = await service.publish(1, 0, stream(buckets))
        assert published.manifest == manifest_of(buckets, 1)
        source = await replica.fetch(published)
        found = {}
        async for bucket in self.receive(source):
            for spec in bucket.specs:
                aliases = spec.aliases if source.path is None else None  # a file's are its reader's
                found[spec.name] = (aliases, bucket.tensor_bytes(spec).tobytes())
        assert found == {
            spec.name: (
                spec.aliases if source.path is None else None,
                bucket.tensor_bytes(spec).tobytes(),
            )
            for bucket in buckets
            for spec in bucket.specs
        }

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
        for buckets in ([first, first], [outside], []):
            with pytest.raises(DataError):
                await service.publish(1, 0, stream(buckets))
        assert (await service.stats()).versions == ()

    async def test_publish_that_fails_closes_its_source(self, service: WeightSync) -> None:
        """WS-5; a trainer may wait for the end of its export."""
        first, *_ = random_buckets(1)
        closed: list[bool] = []

        async def source() -> AsyncIterator[Bucket]:
            try:
                for _ in range(3):
                    yield first
            finally:
                closed.append(True)

        buckets = source()
        with pytest.raises(DataError):
            await service.publish(1, 0, buckets)
        assert closed == [True]

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

    async def test_publish_cancelled_while_it_waits_takes_no_room(
        self, service: WeightSync, capabilities: WeightSyncCapabilities
    ) -> None:
        """WS-7."""
        count = capabilities.concurrent_versions
        for version in range(count):
            await service.publish(version, 0, stream(random_buckets(version)))
        waiting = asyncio.ensure_future(service.publish(count, 0, stream(random_buckets(count))))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await service.retire(0)
        await asyncio.wait_for(service.publish(count, 0, stream(random_buckets(count))), 10)
        assert (await service.stats()).versions == tuple(range(1, count + 1))

    async def test_fetch_counts_bytes(self, service: WeightSync, replica: WeightSync) -> None:
        """WS-8."""
        published = await service.publish(1, 0, stream(random_buckets(1)))
        await self.checksum(replica, published)
        assert (await replica.stats()).bytes_fetched >= published.manifest.nbytes

    async def test_coming_version_is_fetched_while_it_is_published(
        self, service: WeightSync, replica: WeightSync, capabilities: WeightSyncCapabilities
    ) -> None:
        """WS-13; bucket after bucket, each as soon as it was given."""
        requires(capabilities.overlapped_fetch, "overlapped_fetch: True")
        assert isinstance(service, SupportsOverlappedFetch)
        first = asyncio.ensure_future(service.publish(1, 0, stream(random_buckets(1))))
        assert await service.coming(1, 0) is None  # nobody knows yet what a model consists of
        await first
        await service.retire(1)
        given, received = asyncio.Semaphore(0), Checksum()

        async def one_by_one() -> AsyncIterator[Bucket]:
            async for bucket in reused(random_buckets(2)):
                await given.acquire()
                yield bucket

        publishing = asyncio.ensure_future(service.publish(2, 0, one_by_one()))
        coming = await service.coming(2, 0)
        assert coming is not None
        assert (coming.manifest.version, coming.manifest.checksum) == (2, "")
        await replica.attach("rollout-0", coming)
        given.release()
        async for bucket in self.receive(await replica.fetch(coming)):
            for spec in bucket.specs:
                data = bucket.tensor_bytes(spec)
                received.add(spec.name, spec.dtype, spec.shape, data)
            given.release()  # the next one is given only now
        published = await publishing
        assert published.manifest == manifest_of(random_buckets(2), 2)
        assert replace(published.manifest, checksum="") == coming.manifest
        assert received.hexdigest() == published.manifest.checksum
        assert await self.checksum(replica, published) == published.manifest.checksum

    @pytest.mark.parametrize("end", ["error", "cancelled"])
    async def test_coming_version_that_fails_ends_the_fetch(
        self,
        service: WeightSync,
        replica: WeightSync,
        capabilities: WeightSyncCapabilities,
        end: str,
    ) -> None:
        """WS-13, WS-5."""
        requires(capabilities.overlapped_fetch, "overlapped_fetch: True")
        assert isinstance(service, SupportsOverlappedFetch)
        await service.publish(1, 0, stream(random_buckets(1)))
        await service.retire(1)
        begun, cut = asyncio.Event(), asyncio.Event()

        async def cut_off() -> AsyncIterator[Bucket]:
            yield random_buckets(2)[0]
            begun.set()
            await cut.wait()
            raise DataError("cut")

        publishing = asyncio.ensure_future(service.publish(2, 0, cut_off()))
        coming = await service.coming(2, 0)
        assert coming is not None
        fetching = asyncio.ensure_future(self.checksum(replica, coming))
        await begun.wait()
        if end == "error":
            cut.set()
        else:
            publishing.cancel()
        with pytest.raises(ServiceError):
            await fetching
        with pytest.raises((DataError, asyncio.CancelledError)):
            await publishing
        assert (await service.stats()).versions == ()
        again = await service.publish(2, 0, stream(random_buckets(2)))
        assert await self.checksum(replica, again) == again.manifest.checksum

    async def test_coming_version_of_other_tensors_fails_or_differs(
        self, service: WeightSync, replica: WeightSync, capabilities: WeightSyncCapabilities
    ) -> None:
        """WS-13; what comes is not what was expected: the checksum of what is published says so."""
        requires(capabilities.overlapped_fetch, "overlapped_fetch: True")
        assert isinstance(service, SupportsOverlappedFetch)
        await service.publish(1, 0, stream(random_buckets(1)))
        for version, other in enumerate((random_buckets(2)[:2], [*random_buckets(3)[::-1]]), 2):
            await service.retire(version - 1)
            publishing = asyncio.ensure_future(service.publish(version, 0, stream(other)))
            coming = await service.coming(version, 0)
            assert coming is not None
            try:
                found = await self.checksum(replica, coming)
            except ServiceError:
                found = ""
            published = await publishing
            assert found != published.manifest.checksum
            assert published.manifest == manifest_of(other, version)
            assert await self.checksum(replica, published) == published.manifest.checksum

    async def test_fetch_next_versions_bit_equal(
        self, service: WeightSync, replica: WeightSync
    ) -> None:
        """WS-3; version after version through the same memory."""
        for version in range(4):
            published = await service.publish(version, 0, reused(random_buckets(version)))
            assert await self.checksum(replica, published) == published.manifest.checksum
            expected = manifest_of(random_buckets(version), version)
            assert published.manifest.checksum == expected.checksum
            await service.retire(version)

    async def test_version_of_two_lives_held_and_retired_apart(
        self, service: WeightSync, replica: WeightSync, capabilities: WeightSyncCapabilities
    ) -> None:
        """WS-10."""
        requires(capabilities.concurrent_versions > 1, "concurrent_versions: 2")
        await service.publish(1, 0, stream(random_buckets(1)))
        second = await service.publish(1, 1, stream(random_buckets(2)))
        await service.retire(1, 0)
        assert await self.checksum(replica, second) == manifest_of(random_buckets(2), 1).checksum

    async def test_retired_while_it_is_read_right_bytes_or_an_error(
        self, service: WeightSync, replica: WeightSync
    ) -> None:
        """WS-11."""
        published = await service.publish(1, 0, reused(random_buckets(1)))
        source = await replica.fetch(published)
        await service.retire(1)
        for version in (2, 3):
            await service.publish(version, 0, reused(random_buckets(version)))
            await service.retire(version)
        try:
            found = await self.checksum_of(source)
        except (AsyncFlowError, OSError):
            return
        assert found == published.manifest.checksum

    async def test_parts_of_several_ranks_are_one_version(
        self, service: WeightSync, replica: WeightSync, capabilities: WeightSyncCapabilities
    ) -> None:
        """WS-12; two ranks publish their shares, here one after another under two lives."""
        requires(capabilities.source == "buckets", "source: buckets")
        requires(capabilities.concurrent_versions > 1, "concurrent_versions: 2")
        whole, parts = random_buckets(1), {}
        for rank in range(2):
            parts[rank] = await service.publish(1, rank, stream(whole[rank::2]))
        merged = PublishedWeights.merged(parts)
        assert merged.manifest.checksum == manifest_of(whole, 1).checksum
        assert [part.rank for part in merged.parts] == [0, 1]
        sources = [await replica.fetch(part) for part in merged.split()]
        joined = WeightSource.joined(merged.manifest, sources)
        assert await self.checksum_of(joined) == merged.manifest.checksum

    async def test_retire_unknown_version_is_no_error(
        self, service: WeightSync, replica: WeightSync
    ) -> None:
        """WS-9; nor one that is retired already, which can be published again."""
        await service.retire(99)
        await service.publish(1, 0, stream(random_buckets(1)))
        for _ in range(2):
            await service.retire(1)
        again = await service.publish(1, 0, stream(random_buckets(2)))
        assert await self.checksum(replica, again) == manifest_of(random_buckets(2), 1).checksum
