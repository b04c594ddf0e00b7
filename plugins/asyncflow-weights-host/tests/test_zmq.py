"""The transport over ZeroMQ beyond the contract: chains, deltas, strangers, the dead."""

import asyncio
import gc
import socket as unix
import sys
from dataclasses import replace

import numpy as np
import pytest
import zmq
from pydantic import ValidationError

from asyncflow_core.errors import ConfigError, DataError, PeerLostError, ServiceError
from asyncflow_core.parts import PartContext
from asyncflow_core.services.weight_sync import Bucket, Checksum, TensorSpec
from asyncflow_core.testing.aio import eventually, stream
from asyncflow_core.wire import KeyPair, split_key
from asyncflow_weights_host import delta
from asyncflow_weights_host.held import CHUNK_BYTES
from asyncflow_weights_host.options import ZmqOptions
from asyncflow_weights_host.protocol import Content, Header, Op
from asyncflow_weights_host.zmq_service import ZmqWeightSync

SIZE = 5 * CHUNK_BYTES + 123


def model(version, size=SIZE):
    """Two buckets, one of them of several chunks; a few bytes differ from version to version."""
    values = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    values[:: size // 7] = version
    small = np.full(24, version, np.uint8)
    return [
        Bucket((TensorSpec("big", "U8", (size,), aliases=("tied",)),), values),
        Bucket((TensorSpec("a", "F32", (2,)), TensorSpec("b", "BF16", (8,), 8)), small),
    ]


@pytest.fixture
def make(tmp_path):
    def made(name="weights", **options):
        return ZmqWeightSync(ZmqOptions(**options), PartContext(name, run_dir=tmp_path))

    return made


async def receive(side, published):
    checksum = Checksum()
    async for bucket in (await side.fetch(published)).buckets:
        for spec in bucket.specs:
            checksum.add(spec.name, spec.dtype, spec.shape, bucket.tensor_bytes(spec))
    return checksum.hexdigest()


async def put(side, version, life=0):
    return await side.publish(version, life, stream(model(version)))


async def test_four_replicas_trainer_sends_each_byte_once(make):
    async with make() as trainer, make() as r0, make() as r1, make() as r2, make() as r3:
        published = await put(trainer, 1)
        replicas = (r0, r1, r2, r3)
        found = await asyncio.gather(*[receive(r, published) for r in replicas])
        assert found == [published.manifest.checksum] * 4
        assert (await trainer.stats()).bytes_sent == published.manifest.nbytes
        received = [(await r.stats()).bytes_received for r in replicas]
        assert received == [published.manifest.nbytes] * 4


async def test_parts_of_two_publishers_come_side_by_side_version_after_version(make):
    sides = [make(delta=True), make(delta=True)]
    async with sides[0], sides[1], make(delta=True) as replica:
        for version in range(3):
            for side in sides:
                published = await put(side, version)
                assert await receive(replica, published) == published.manifest.checksum
                await side.retire(version - 1)
        moved = (await replica.stats()).bytes_received
        assert moved < 2.1 * published.manifest.nbytes


async def test_version_fetched_again_comes_anew_from_the_trainer(make):
    async with make() as trainer, make() as replica:
        published = await put(trainer, 1)
        for _ in range(2):
            assert await receive(replica, published) == published.manifest.checksum
        assert (await trainer.stats()).bytes_sent == 2 * published.manifest.nbytes


async def test_parent_that_falls_silent_is_left_out(make):
    async with make() as trainer, make(stall_s=0.3) as child:
        middle = make(stall_s=0.3)
        await middle.open()
        published = await put(trainer, 1)
        assert await receive(middle, published) == published.manifest.checksum
        middle._node._serve = lambda: None  # it lives, and answers no more
        assert await receive(child, published) == published.manifest.checksum
        assert (await trainer.stats()).bytes_sent == 2 * published.manifest.nbytes
        await middle.aclose()


async def test_publisher_that_dies_in_the_middle_fails_the_fetch_by_name(make):
    trainer = make()
    await trainer.open()
    async with make(stall_s=0.3) as replica:
        published = await put(trainer, 1)
        await replica.attach("rollout-0", published)
        await trainer.aclose()
        with pytest.raises(PeerLostError, match=r"version 1 did not come.*publisher at ipc:"):
            await receive(replica, published)
        with pytest.raises(ServiceError, match="does not answer"):
            await replica.attach("rollout-0", published)


async def test_delta_moves_only_what_changed(make):
    async with make(delta=True) as trainer, make(delta=True) as replica:
        for version in range(3):
            published = await put(trainer, version)
            before = (await replica.stats()).bytes_received
            assert await receive(replica, published) == published.manifest.checksum
            moved = (await replica.stats()).bytes_received - before
            assert (moved < published.manifest.nbytes // 100) == (version > 0)
            await trainer.retire(version)


async def test_delta_replica_that_missed_a_version_gets_the_next_whole(make):
    async with make(delta=True, versions=3) as trainer, make(delta=True) as replica:
        await receive(replica, await put(trainer, 0))
        await put(trainer, 1)
        last = await put(trainer, 2)
        assert last.locator["delta"][0] == 1
        before = (await replica.stats()).bytes_received
        assert await receive(replica, last) == last.manifest.checksum
        assert (await replica.stats()).bytes_received - before == last.manifest.nbytes


async def test_delta_on_a_damaged_base_is_refused_and_the_version_comes_whole(make, caplog):
    async with make(delta=True) as trainer, make(delta=True) as replica:
        await receive(replica, await put(trainer, 0))
        next(iter(replica._bases.values())).buckets[0].data[77] ^= 1
        published = await put(trainer, 1)
        assert await receive(replica, published) == published.manifest.checksum
        assert "another checksum" in caplog.text


async def test_delta_between_other_shapes_is_not_offered(make):
    async with make(delta=True) as trainer:
        await put(trainer, 0)
        published = await trainer.publish(1, 0, stream(model(1, SIZE - 1)))
        assert published.locator["delta"] is None


@pytest.mark.parametrize("dtype", ["F32", "BF16", "U8", "F64"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_delta_any_change_is_lossless(dtype, share):
    rng = np.random.default_rng(1)
    spec = TensorSpec("w", dtype, (3, 1001), 5)
    base = rng.integers(0, 256, 5 + spec.nbytes, np.uint8)
    changed = rng.random(len(base)) < share
    new = np.where(changed, rng.integers(0, 256, len(base), np.uint8), base)
    found = delta.encode(base, new, [spec])
    out = delta.apply(base, found, [spec])
    np.testing.assert_array_equal(out[5:], new[5:])
    assert len(found) < spec.nbytes * min(1.0, 6 * share, 0.13 + 1.1 * share) + 100


def test_delta_cut_off_too_long_or_foreign_is_refused():
    spec = TensorSpec("w", "F32", (100,))
    base = np.zeros(400, np.uint8)
    good = delta.encode(base, np.arange(400, dtype=np.uint8), [spec])
    other = good.copy()
    other[0] = 9
    for bad in (good[:-1], np.append(good, good[:1]), other):
        with pytest.raises(DataError):
            delta.apply(base, bad, [spec])


async def test_stranger_without_the_token_gets_no_answer(make):
    async with make() as trainer:
        published = await put(trainer, 1)
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(published.locator["address"])
            for message in (
                Header(Op.GET, Content(b"x" * 16, 1, 0, False)).pack(),
                b"nonsense",
                Header(Op.HAS, Content(published.locator["token"], 1, 0, False)).pack(),
            ):
                socket.send_multipart([message, b""])
            assert socket.poll(2000)
            answer = Header.unpack(socket.recv_multipart()[0])
            assert answer.op is Op.PARENT
            assert not socket.poll(50)


async def test_way_beyond_this_machine_is_encrypted_and_needs_the_key(make, monkeypatch):
    monkeypatch.setattr("asyncflow_weights_host.sockets.is_local", lambda _: False)
    monkeypatch.setattr("asyncflow_weights_host.zmq_service.is_local", lambda _: False)
    listen = "tcp://127.0.0.1:*"
    async with make(listen=listen) as trainer, make(listen=listen, stall_s=0.5) as replica:
        published = await put(trainer, 1)
        assert split_key(published.locator["address"])[1] is not None
        assert await receive(replica, published) == published.manifest.checksum
        pair = KeyPair.new()
        strange = [pair.public, pair.secret]
        async with make(listen=listen, stall_s=0.5) as stranger:
            locator = {**published.locator, "client": strange}
            with pytest.raises(ServiceError, match="does not answer"):
                await stranger.attach("stranger", replace(published, locator=locator))


async def test_replica_fetches_over_the_ipv6_loopback(make):
    listen = "tcp://[::1]:*"
    async with make(listen=listen) as trainer, make(listen=listen) as replica:
        published = await put(trainer, 1)
        assert published.locator["address"].startswith("tcp://[::1]:")
        assert await receive(replica, published) == published.manifest.checksum


async def test_address_that_is_none_is_refused(make, tmp_path):
    with pytest.raises(ConfigError, match="neither ipc"):
        await make(listen="udp://x").open()
    with pytest.raises(ConfigError, match="run directory"):
        await ZmqWeightSync(ZmqOptions(), PartContext("x")).open()
    for everywhere in ("tcp://*:5555", "tcp://0.0.0.0:*", "tcp://[::]:*"):
        with pytest.raises(ValidationError, match="does not say where others reach"):
            ZmqOptions(listen=everywhere)


@pytest.mark.parametrize(
    "change",
    [
        {"buckets": []},
        {"token": b"short"},
        {"delta": [0, 0, "x", [1, 2, 3]]},
        {"client": 3},
        {"client": [b"short", b"short"]},
        {"address": "tcp://10.0.0.5:5"},
        {"address": "tcp://10.0.0.5:5#none"},
    ],
)
async def test_locator_that_is_not_sound_refused(make, change):
    async with make() as trainer, make() as replica:
        published = await put(trainer, 1)
        with pytest.raises(DataError):
            await replica.fetch(replace(published, locator={**published.locator, **change}))


async def test_replica_holds_two_versions_at_most(make):
    async with make() as trainer, make() as replica:
        for version in range(5):
            await receive(replica, await put(trainer, version))
            await trainer.retire(version)
        await eventually(lambda: len(replica._node._held) <= 2)
        gc.collect()


async def join_as(published, who):
    """Ask a publisher for a version under an address, as any member can that has its locator."""
    manifest = published.manifest
    content = Content(published.locator["token"], manifest.version, manifest.life, False)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(published.locator["address"])
        socket.send_multipart([Header(Op.JOIN, content).pack(), who])
        assert await asyncio.to_thread(socket.poll, 5000)


@pytest.mark.parametrize(
    "who", [b"nonsense", b"tcp://1.2.3.4:5", b"tcp://h#x", b"ipc:///" + b"x" * 200]
)
async def test_parent_whose_address_is_none_is_left_out(make, who):
    async with make() as trainer, make() as replica:
        published = await put(trainer, 1)
        await join_as(published, who)
        found = await asyncio.wait_for(receive(replica, published), 20)
        assert found == published.manifest.checksum


async def test_side_whose_thread_fails_raises_and_never_waits(make):
    async with make() as trainer, make() as replica:
        published = await put(trainer, 1)
        await replica.attach("rollout-0", published)

        def fail(_pull):
            raise MemoryError("no room")

        replica._node._receive = fail
        for _ in range(2):
            with pytest.raises(ServiceError, match="thread that moves weights failed: MemoryError"):
                await asyncio.wait_for(receive(replica, published), 20)
        trainer._node._serve = lambda: fail(None)
        with pytest.raises(ServiceError, match="moved no more"):
            await replica.attach("rollout-0", published)
        async with make(stall_s=0.3) as other:
            with pytest.raises(ServiceError, match="does not answer"):
                await other.attach("rollout-1", published)
        await eventually(lambda: not trainer._node.is_alive())
        with pytest.raises(ServiceError, match="thread that moves weights failed"):
            await put(trainer, 2)


async def test_sockets_of_killed_processes_are_removed_and_those_of_the_living_stay(make, tmp_path):
    dead = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await dead.wait()
    left, foreign = tmp_path / f"weights-{dead.pid}-aa.sock", tmp_path / "weights-x-y.sock"
    for path in (left, foreign):
        with unix.socket(unix.AF_UNIX) as sock:
            sock.bind(str(path))
    async with make() as trainer:
        published = await put(trainer, 1)
        assert not left.exists()
        assert foreign.exists()
        async with make() as replica:
            assert await receive(replica, published) == published.manifest.checksum
    assert [path.name for path in tmp_path.glob("weights-*.sock")] == [foreign.name]
