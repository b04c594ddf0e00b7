"""What can go wrong with weights, in real processes: what is detected, and in how long."""

import asyncio
import signal

import pytest

from asyncflow_core.errors import BackpressureError, InvariantError, PeerLostError, ServiceError
from asyncflow_core.testing.aio import eventually

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]
HOST_AND_ZMQ = pytest.mark.parametrize("transport", ["host", "zmq"])


@pytest.mark.parametrize("transport", ["host", "zmq", "disk"])
async def test_bit_flipped_in_flight_is_seen_and_taken_in_again(
    cluster, detected, clock, transport
):
    async with cluster(
        transport, options={"source": "buckets"} if transport == "disk" else {}
    ) as c:
        await c.publish(0)
        await c.serve(0)
        await c.replicas["rollout-0"].faults.flip(1)
        watch = clock()
        await c.publish(1)
        await c.serve(1)
        assert c.switching.failures == 1
        detected("bit flipped in flight, once", "checksum; taken in again", watch())
        await c.replicas["rollout-0"].faults.flip(2**31)
        watch = clock()
        await c.publish(2)
        error = await c.failed()
        assert "rollout-0 cannot be brought to weights version 2: checksum" in str(error)
        assert (await c.replicas["rollout-0"].control.stats()).version == 1
        detected("bit flipped in flight, always", "checksum; 1 serves, replica named", watch())


@HOST_AND_ZMQ
async def test_engine_that_serves_other_bits_than_it_staged_is_found_by_verify(
    cluster, detected, clock, transport
):
    async with cluster(transport, verify_every=1) as c:
        await c.publish(0)
        await eventually(lambda: c.switching.compared == 1, timeout_s=30)
        await c.replicas["rollout-0"].faults.damage_served()
        watch = clock()
        await c.publish(1)
        error = await c.failed()
        assert "'w3' with 1 of 1048576 bytes different" in str(error)
        assert "the first at byte 77" in str(error)
        detected("engine serves another bit", "verify: tensor and byte named", watch())


@HOST_AND_ZMQ
async def test_replica_killed_while_staging_is_named_and_others_serve_on(
    cluster, detected, clock, transport
):
    async with cluster(transport, replicas=2, attempts=1) as c:
        await c.publish(0)
        await c.serve(0)
        await c.replicas["rollout-0"].faults.slow(0.5)
        await c.publish(1)
        await c.serve(1, "rollout-1")
        watch = clock()
        c.replicas["rollout-0"].signal(signal.SIGKILL)
        error = await c.failed()
        assert "rollout-0 cannot be brought to weights version 1" in str(error)
        detected("replica killed while staging", "lost connection, replica named", watch())


@HOST_AND_ZMQ
async def test_replica_restarted_in_the_middle_catches_up_first(
    cluster, detected, clock, transport
):
    async with cluster(transport, replicas=2) as c:
        await c.publish(0)
        await c.serve(0)
        victim = c.replicas.pop("rollout-0")
        await victim.faults.slow(0.5)
        await c.publish(1)
        c.switching.left("rollout-0")  # as its process handle says
        victim.signal(signal.SIGKILL)
        await c.publish(2)
        await c.serve(2, "rollout-1")
        watch = clock()
        again = await c.start("rollout")
        c.replicas["rollout-0"] = again
        assert (await again.control.stats()).version == -1
        c.switching.joined("rollout-0", again.control)
        await c.serve(2)
        detected("restart in the middle", "start, catch-up to the newest", watch())


@HOST_AND_ZMQ
async def test_trainer_killed_while_publishing_leaves_the_old_version_serving(
    cluster, detected, clock, transport
):
    async with cluster(transport) as c:
        await c.publish(0)
        await c.serve(0)
        await c.trainer.faults.slow(0.3)
        # The replica stages what comes, where the transport can.
        publishing = asyncio.ensure_future(c.publish(1))
        await asyncio.sleep(0)
        await c.trainer.faults.slow(0.3)
        watch = clock()
        c.trainer.signal(signal.SIGKILL)
        with pytest.raises(PeerLostError):
            await publishing
        detected("trainer killed while publishing", "lost connection; 0 serves", watch())
        assert (await c.replicas["rollout-0"].control.stats()).version == 0
        watch = clock()
        c.trainer = await c.start("trainer")
        if transport == "host":
            left = list(c.run_dir.glob("weights/pub-*/*"))
            assert left == []
        c.switching._trainer = c.trainer.control
        await c.publish(0, life=1)
        await eventually(lambda: c.switching._protocol.settled(), timeout_s=30)
        await c.publish(1, life=1)
        await c.serve(1)
        detected("trainer's next life", "restart, swept, replica follows", watch())


@pytest.mark.parametrize("transport", ["host", "disk"])
async def test_full_disk_is_an_error_of_publish_that_leaves_nothing(
    cluster, detected, clock, transport
):
    options = {"source": "buckets"} if transport == "disk" else {}
    async with cluster(transport, options={**options, "versions": 3}) as c:
        await c.publish(0)
        await c.serve(0)
        before = sorted(c.run_dir.rglob("*.weights")) + sorted(c.run_dir.rglob("*.safetensors"))
        await c.trainer.faults.fill_disk(3 << 20)
        watch = clock()
        with pytest.raises(BackpressureError, match="version 1 does not fit"):
            await c.trainer.control.publish(1, 0)
        detected("full disk", "error of publish; nothing left, 0 serves", watch())
        after = sorted(c.run_dir.rglob("*.weights")) + sorted(c.run_dir.rglob("*.safetensors"))
        assert before == after
        await c.trainer.faults.fill_disk(1 << 40)
        await c.publish(1)
        await c.serve(1)


@HOST_AND_ZMQ
async def test_replica_that_never_answers_is_given_up_and_holds_up_nobody(
    cluster, detected, clock, transport
):
    async with cluster(transport, replicas=2, stage_timeout_s=3) as c:
        await c.publish(0)
        await c.serve(0)
        c.replicas["rollout-0"].signal(signal.SIGSTOP)
        watch = clock()
        await c.publish(1)
        await c.serve(1, "rollout-1")
        detected("stopped replica, the other one", "serves the new version", watch())
        error = await c.failed()
        assert "rollout-0" in str(error)
        assert "no answer while staging, its deadline passed" in str(error)
        detected("replica that never answers", "deadline of 3 s, replica named", watch())


@HOST_AND_ZMQ
async def test_two_versions_published_at_once_the_newest_serves_and_the_old_is_retired(
    cluster, detected, clock, transport
):
    async with cluster(transport, replicas=2, options={"versions": 4}) as c:
        await c.replicas["rollout-0"].faults.slow(0.05)
        watch = clock()
        found = await asyncio.gather(*[c.trainer.control.publish(v, 0) for v in range(3)])
        for weights in found:
            c.switching.published(weights)
        await c.serve(2)
        detected("versions published at once", "all replicas at the newest", watch())
        watch = clock()
        with pytest.raises(ServiceError, match=r"already published"):
            await c.trainer.control.publish(2, 0)
        other = await c.trainer.control.publish(3, 0)
        c.switching.published(other)
        wrong = type(other)(type(other.manifest)(3, 0, (), "0" * 16, 0), other.transport)
        with pytest.raises(InvariantError, match="published twice"):
            c.switching.published(wrong)
        await c.serve(3)
        detected("one version published twice", "refused by trainer and protocol", watch())
