import asyncio
import threading
from collections import deque
from dataclasses import replace

import pytest
import torch

from asyncflow_core.errors import DataError, ServiceClosedError, ServiceError
from asyncflow_core.parts import PartContext
from asyncflow_core.services.weight_sync import Checksum
from asyncflow_core.testing.aio import eventually, stream
from asyncflow_core.testing.weight_sync import WeightSyncTests, random_buckets
from asyncflow_weights_collective.group import Membership, connect, receive
from asyncflow_weights_collective.options import CollectiveOptions
from asyncflow_weights_collective.plugin import capabilities
from asyncflow_weights_collective.service import CollectiveWeightSync


async def received(source):
    """The buckets of a source, as a rollout takes them: beside the event loop."""
    buckets = receive(Membership.of(source.collective), source.manifest.tensors)
    while (bucket := await asyncio.to_thread(next, buckets, None)) is not None:
        yield bucket


class TestCollective(WeightSyncTests):
    backend = "gloo"

    @pytest.fixture
    def options(self):
        return CollectiveOptions(backend=self.backend, timeout_s=8, gather_s=0.01)

    @pytest.fixture
    def capabilities(self, options):
        return capabilities(options)

    @pytest.fixture
    async def service(self, options):
        async with CollectiveWeightSync(options, PartContext("trainer")) as made:
            yield made

    @pytest.fixture
    async def replica(self, options):
        async with CollectiveWeightSync(options, PartContext("rollout")) as made:
            yield made

    @pytest.fixture
    def unopened(self, options):
        return CollectiveWeightSync(options, PartContext("x"))

    async def receive(self, source):
        async for bucket in received(source):
            yield bucket


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestCollectiveNccl(TestCollective):
    backend = "nccl"


async def checksum(source):
    found = Checksum()
    async for bucket in received(source):
        for spec in bucket.specs:
            found.add(spec.name, spec.dtype, spec.shape, bucket.tensor_bytes(spec))
    return found.hexdigest()


def side(**options):
    return CollectiveWeightSync(CollectiveOptions(**options), PartContext("side"))


async def test_replicas_that_ask_together_share_one_broadcast():
    async with side(gather_s=0.5) as trainer, side() as r0, side() as r1:
        published = await trainer.publish(1, 0, stream(random_buckets(1)))
        sources = await asyncio.gather(r0.fetch(published), r1.fetch(published))
        assert len({source.collective["group"] for source in sources}) == 1
        assert [source.collective["world_size"] for source in sources] == [3, 3]
        found = await asyncio.gather(*[checksum(source) for source in sources])
        assert found == [published.manifest.checksum] * 2


async def test_member_that_never_joins_fails_the_others_by_the_deadline_and_they_ask_again():
    async with side(gather_s=0.3, timeout_s=1) as trainer, side() as r0, side() as r1:
        published = await trainer.publish(1, 0, stream(random_buckets(1)))
        source, _ = await asyncio.gather(r0.fetch(published), r1.fetch(published))
        with pytest.raises(RuntimeError):
            await asyncio.wait_for(checksum(source), 30)
        again = await r0.fetch(published)
        assert await checksum(again) == published.manifest.checksum


async def test_publisher_that_is_gone_is_named_by_the_deadline():
    trainer = side()
    await trainer.open()
    async with side(timeout_s=1) as replica:
        published = await trainer.publish(1, 0, stream(random_buckets(1)))
        await trainer.aclose()
        with pytest.raises(ServiceError, match="does not answer within 1 s"):
            await replica.attach("rollout-0", published)


async def test_locator_or_membership_that_is_not_sound_refused():
    async with side() as trainer:
        published = await trainer.publish(1, 0, stream(random_buckets(1)))
        with pytest.raises(DataError, match="locator"):
            await trainer.fetch(replace(published, locator={"host": 1}))
    with pytest.raises(DataError, match="join"):
        Membership.of({"buckets": [[1]]})


async def test_replica_that_dies_before_it_asked_holds_up_nobody():
    async with side() as trainer, side(timeout_s=20) as replica:
        published = await trainer.publish(1, 0, stream(random_buckets(1)))
        store = connect("127.0.0.1", published.locator["port"], 20)
        store.add("requests", 1)  # its number is taken, and nothing follows
        assert await checksum(await replica.fetch(published)) == published.manifest.checksum


async def test_many_versions_leave_nothing_in_the_store_nor_in_the_process_nor_on_stderr(capfd):
    async with side(gather_s=0.0) as trainer, side() as replica:
        for version in range(6):
            published = await trainer.publish(version, 0, stream(random_buckets(version)))
            assert await checksum(await replica.fetch(published)) == published.manifest.checksum
            await trainer.retire(version)
        _, sender = await trainer._served
        sender._past = deque((0.0, group) for _, group in sender._past)  # their deadline passed
        store = connect("127.0.0.1", published.locator["port"], 20)
        await eventually(lambda: store.list_keys() == ["requests"])
        await eventually(lambda: not [t for t in threading.enumerate() if "group" in t.name])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("cancelled", [True, False])
async def test_aclose_ends_what_a_first_publish_was_only_making(cancelled):
    trainer = side()
    await trainer.open()
    publishing = asyncio.ensure_future(trainer.publish(1, 0, stream(random_buckets(1))))
    await asyncio.sleep(0)
    if cancelled:
        publishing.cancel()
    await trainer.aclose()
    with pytest.raises((ServiceClosedError, asyncio.CancelledError)):
        await publishing
    assert not [t for t in threading.enumerate() if t.name == "weights-sender"]
