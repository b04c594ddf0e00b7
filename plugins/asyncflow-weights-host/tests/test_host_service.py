import asyncio
import errno
import gc
import os
import resource
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncflow_core.errors import (
    BackpressureError,
    ConfigError,
    DataError,
    ServiceClosedError,
    ServiceError,
    ServiceTimeoutError,
)
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registry
from asyncflow_core.services.weight_sync import Bucket, Checksum, TensorSpec
from asyncflow_core.testing.aio import collect, eventually, stream
from asyncflow_core.testing.weight_sync import random_buckets
from asyncflow_weights_host import plugin
from asyncflow_weights_host.files import ALIGNMENT, publisher_gone
from asyncflow_weights_host.options import HostOptions
from asyncflow_weights_host.service import HostWeightSync


@pytest.fixture
def make(tmp_path):
    def made(**options):
        return HostWeightSync(HostOptions(**options), PartContext("weights", run_dir=tmp_path))

    return made


def files(root):
    return sorted(p.name for p in Path(root).rglob("*") if p.is_file() and "lock" not in p.name)


def own(service):
    return service._directory.path


def status(published):
    return Path(published.locator["path"]).stat()


def flip_bit(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


async def put(service, version, life=0):
    return await service.publish(version, life, stream(random_buckets(version)))


async def digest(service, published):
    checksum = Checksum()
    async for bucket in (await service.fetch(published)).buckets:
        for spec in bucket.specs:
            checksum.add(spec.name, spec.dtype, spec.shape, bucket.tensor_bytes(spec))
    return checksum.hexdigest()


async def test_fetch_views_are_read_only_not_copied_and_outlive_everything(make):
    async with make() as service, make() as replica:
        published = await put(service, 1)
        buckets = await collect((await replica.fetch(published)).buckets)
        bases = {id(b.data.base.base if b.data.base.base is not None else None) for b in buckets}
        assert len(bases) == 1
        assert not any(b.data.flags.writeable or b.data.flags.owndata for b in buckets)
        assert all(b.data.ctypes.data % 64 == 0 for b in buckets)
        await service.retire(1)
        for version in (2, 3):
            await put(service, version)
    for bucket, expected in zip(buckets, random_buckets(1), strict=True):
        assert bucket.specs == expected.specs
        np.testing.assert_array_equal(bucket.data, expected.data)


async def test_bit_flip_in_the_file_is_seen_by_the_receiver(make):
    async with make() as service, make() as replica:
        published = await put(service, 1)
        assert await digest(replica, published) == published.manifest.checksum
        place = published.locator["buckets"][1]
        number, offset = place["tensors"][0]
        at = place["offset"] + offset + published.manifest.tensors[number].nbytes - 1
        flip_bit(published.locator["path"], at)
        assert await digest(replica, published) != published.manifest.checksum


async def test_files_are_private_and_gone_after_aclose(make, tmp_path):
    service = make()
    async with service:
        published = await put(service, 1)
        assert stat.S_IMODE(os.stat(own(service)).st_mode) == 0o700
        assert stat.S_IMODE(status(published).st_mode) == 0o600
    assert files(tmp_path) == []
    assert list((tmp_path / "weights").glob("pub-*")) == []
    await service.aclose()


async def test_retired_file_is_used_again_unless_mapped(make):
    async with make() as service, make() as replica:
        first = await put(service, 1)
        inode = status(first).st_ino
        await service.retire(1)
        assert files(own(service)) == ["spare"]
        second = await put(service, 2)
        assert status(second).st_ino == inode
        source = await replica.fetch(second)
        await service.retire(2)
        third = await put(service, 3)  # 2 is mapped: another file
        assert status(third).st_ino != inode
        got = await collect(source.buckets)
        np.testing.assert_array_equal(got[0].data, random_buckets(2)[0].data)
        assert await digest(replica, third) == third.manifest.checksum


async def test_file_in_turn_is_mapped_once_and_still_locked_by_each_reader(make):
    async with make() as service, make() as replica:
        kept = []
        for version in range(6):
            if version >= 2:
                await service.retire(version - 2)
            published = await put(service, version)
            assert await digest(replica, published) == published.manifest.checksum
            kept = [*kept[-1:], await collect((await replica.fetch(published)).buckets)]
            assert len(replica._mappings._known) <= 3
        for version, buckets in zip((4, 5), kept, strict=True):
            np.testing.assert_array_equal(buckets[1].data, random_buckets(version)[1].data)


async def test_reader_that_let_go_frees_the_spare(make):
    async with make() as service:
        first = await put(service, 1)
        assert await digest(service, first) == first.manifest.checksum
        await asyncio.sleep(0)  # the loop lets go of its last callback
        gc.collect()
        inode = status(first).st_ino
        await service.retire(1)
        second = await put(service, 2)
        assert status(second).st_ino == inode


async def test_never_more_files_than_versions(make):
    async with make(versions=3) as service:
        for version in range(9):
            if version >= 3:
                await service.retire(version - 3)
            await put(service, version)
            assert len(files(own(service))) <= 3
        for version in range(9):
            await service.retire(version)
        assert files(own(service)) == ["spare"]


async def test_smaller_version_into_a_used_file_has_its_own_size(make):
    big = Bucket((TensorSpec("w", "U8", (5000,)),), np.full(5000, 7, np.uint8))
    small = Bucket((TensorSpec("w", "U8", (10,)),), np.full(10, 9, np.uint8))
    async with make() as service:
        await service.publish(1, 0, stream([big]))
        await service.retire(1)
        published = await service.publish(2, 0, stream([small]))
        assert status(published).st_size >= 5000  # readers may have been told so
        await service.retire(2)
        published = await service.publish(3, 0, stream([small]))
        assert status(published).st_size == ALIGNMENT + 10
        assert await digest(service, published) == published.manifest.checksum


async def test_tensor_without_elements_is_carried(make):
    empty = Bucket((TensorSpec("none", "F32", (0, 4)),), np.empty(0, np.uint8))
    async with make() as service:
        published = await service.publish(1, 0, stream([empty]))
        assert await digest(service, published) == published.manifest.checksum


async def test_publish_timeout_names_the_held_versions(make):
    async with make(publish_timeout_s=0.02) as service:
        await put(service, 5)
        await put(service, 6)
        with pytest.raises(ServiceTimeoutError, match=r"version 7 waited 0.02 s.*5, 6 are held"):
            await put(service, 7)
        await service.retire(5)
        await put(service, 7)


async def test_aclose_ends_a_waiting_publish(make):
    service = make(versions=1)
    await service.open()
    await put(service, 1)
    waiting = asyncio.ensure_future(put(service, 2))
    await asyncio.sleep(0)
    await service.aclose()
    with pytest.raises(ServiceClosedError):
        await waiting


async def test_aclose_ends_a_running_publish(make, tmp_path):
    service, go, reached = make(), asyncio.Event(), asyncio.Event()

    async def slow():
        yield random_buckets(1)[0]
        reached.set()
        await go.wait()
        yield random_buckets(1)[1]

    await service.open()
    running = asyncio.ensure_future(service.publish(1, 0, slow()))
    await eventually(reached.is_set)
    await service.aclose()
    go.set()
    with pytest.raises(ServiceClosedError):
        await running
    assert files(tmp_path) == []


async def test_cancelled_in_the_middle_of_a_copy_leaves_nothing(make, monkeypatch):
    async with make() as service:
        loop, entered, release = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        real = os.pwrite

        def slow(fd, data, offset):
            loop.call_soon_threadsafe(entered.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)
            return real(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", slow)
        task = asyncio.ensure_future(put(service, 1))
        await eventually(entered.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        task.cancel()
        assert not task.done()  # the copy cannot be stopped, and its file must not be closed
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        monkeypatch.undo()
        assert files(own(service)) == []
        await put(service, 1)


async def test_no_room_is_an_error_of_publish_that_leaves_nothing(make, monkeypatch):
    async with make() as service:
        await put(service, 1)
        calls = []

        def full(fd, offset, length):
            calls.append(length)
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(BackpressureError, match=r"version 2 does not fit .* bytes free"):
            await put(service, 2)
        assert calls
        monkeypatch.undo()
        assert (await service.stats()).versions == (1,)
        assert len(files(own(service))) == 1
        await put(service, 2)


async def test_errors_of_the_trainer_pass_unchanged(make):
    async with make() as service:
        with pytest.raises(ConnectionResetError):
            await service.publish(1, 0, stream([], error=ConnectionResetError("trainer")))
        with pytest.raises(DataError, match="no tensor"):
            await service.publish(1, 0, stream([]))


async def test_attach_other_host_transport_or_missing_file_said_in_words(make):
    async with make() as service:
        published = await put(service, 1)
        elsewhere = replace(
            published, locator={**published.locator, "boot_id": "other", "host": "node-7"}
        )
        with pytest.raises(ServiceError, match=r"rollout-1.*node-7.*crosses hosts"):
            await service.attach("rollout-1", elsewhere)
        with pytest.raises(ServiceError, match="'collective'"):
            await service.attach("rollout-1", replace(published, transport="collective"))
        await service.attach("rollout-1", published)
        await service.retire(1)
        with pytest.raises(ServiceError, match="retired"):
            await service.attach("rollout-1", published)
        with pytest.raises(ServiceError, match="retired"):
            await service.fetch(published)


@pytest.mark.parametrize(
    "change",
    [
        {"buckets": []},
        {"buckets": [{"offset": 0, "nbytes": 1 << 40, "tensors": [(0, 0), (1, 0)]}]},
        {"buckets": [{"offset": 0, "nbytes": 64, "tensors": [(0, 60), (1, 0)]}]},
        {"buckets": [{"offset": 0, "nbytes": 64, "tensors": [(0, 0), (0, 0)]}]},
        {"buckets": 3},
        {"path": None, "nbytes": "many"},
    ],
)
async def test_fetch_locator_that_points_outside_refused(make, change):
    specs = (TensorSpec("a", "U8", (8,)), TensorSpec("b", "U8", (8,), 8))
    async with make() as service:
        published = await service.publish(1, 0, stream([Bucket(specs, np.zeros(16, np.uint8))]))
        bad = replace(published, locator={**published.locator, **change})
        with pytest.raises(DataError):
            await service.fetch(bad)


async def test_file_of_another_size_refused(make):
    async with make() as service:
        published = await put(service, 1)
        os.truncate(published.locator["path"], 10)
        with pytest.raises(ServiceError, match="10 bytes"):
            await service.fetch(published)


async def test_same_version_in_another_life_is_another_file(make):
    async with make() as service:
        first, second = await put(service, 3, life=0), await put(service, 3, life=1)
        assert first.locator["path"] != second.locator["path"]
        assert (await service.stats()).versions == (3,)
        await service.retire(3)
        assert await digest(service, second) == second.manifest.checksum
        await service.retire(3, 1)
        assert (await service.stats()).versions == ()


async def test_open_without_a_place_says_what_to_set(tmp_path):
    with pytest.raises(ConfigError, match="directory"):
        await HostWeightSync(HostOptions(), PartContext()).open()
    (tmp_path / "file").touch()
    taken = HostWeightSync(HostOptions(directory=tmp_path / "file"), PartContext())
    with pytest.raises(ConfigError, match="cannot use"):
        await taken.open()


def test_registered_capabilities_follow_the_options():
    registry = Registry([])
    registry.add(plugin)
    offer = registry.get("weight_sync", "host")
    able = offer.capabilities_for(offer.options(versions=4))
    assert able.concurrent_versions == 4
    assert "network" not in able.localities


@pytest.fixture
def no_descriptors():
    """No file can be opened until it is called."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    yield lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_living_publisher_is_not_taken_for_dead_without_a_descriptor(make, request):
    async with make() as service:
        await put(service, 1)
        again = request.getfixturevalue("no_descriptors")
        with pytest.raises(OSError, match="Too many open files"):
            publisher_gone(own(service))
        again()
        directory = own(service)
        assert not publisher_gone(directory)
    assert publisher_gone(directory)


async def test_version_that_comes_is_not_given_up_as_dead_without_a_descriptor(make, request):
    async with make() as service, make() as replica:
        await put(service, 1)
        await service.retire(1)
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow():
            first, *rest = random_buckets(2)
            yield first
            begun.set()
            await go_on.wait()
            for bucket in rest:
                yield bucket

        publishing = asyncio.ensure_future(service.publish(2, 0, slow()))
        coming = await service.coming(2, 0)
        source = await replica.fetch(coming)
        await begun.wait()
        again = request.getfixturevalue("no_descriptors")
        with pytest.raises(ServiceError, match="whether its publisher lives cannot be told"):
            await collect(source.buckets)
        again()
        go_on.set()
        assert await digest(replica, await publishing) == (await publishing).manifest.checksum
