"""Ranks as one trainer."""

import asyncio

import numpy as np
import pytest

from asyncflow_core.errors import EngineError, InvariantError, ServiceError
from asyncflow_core.flow.fanout import Ranks, TrainerRank
from asyncflow_core.services.trainer import ForwardBackwardInfo, LossSpec, UpdateInfo
from asyncflow_core.services.weight_sync import (
    Bucket,
    Checksum,
    ManifestBuilder,
    PublishedWeights,
    TensorSpec,
)

LOSS = LossSpec("any")


class Trainer:
    """Counts calls; a rank may fail in one of them, or wait for ever."""

    def __init__(self, number=0, fails_in="", waits_in="", weight=1.0, yields=True):
        self.yields = yields
        self.number, self.fails_in, self.waits_in, self.weight = number, fails_in, waits_in, weight
        self.calls = []
        self.cancelled = []

    async def _call(self, name):
        self.calls.append(name)
        if name == self.fails_in:
            raise EngineError("CUDA out of memory")
        if name == self.waits_in:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise

    async def forward_backward(self, batch, loss, *, last):
        await self._call("forward_backward")
        metrics = {"trainer/clip_share": (self.number + 1.0, 2.0)}
        return ForwardBackwardInfo(1.5, 2.0, 10, batch.rows, metrics)

    async def optim_step(self):
        await self._call("optim_step")
        return UpdateInfo(1, 0.5, 0.1, self.weight)

    async def zero_grad(self):
        await self._call("zero_grad")

    async def export_weights(self, version):
        await self._call("export_weights")
        if self.yields:
            spec = TensorSpec(f"w{self.number}", "U8", (3,))
            yield Bucket((spec,), np.full(3, self.number, np.uint8))

    async def save(self, path):
        await self._call(f"save {path}")

    async def load(self, path):
        await self._call(f"load {path}")


class Exporter(Trainer):
    """One whose ranks write a model together."""

    async def save_model(self, path):
        await self._call(f"save_model {path}")


class Sync:
    """Publishes to nowhere."""

    async def publish(self, version, life, buckets):
        builder = ManifestBuilder(version, life)
        async for bucket in buckets:
            builder.add(bucket)
        return PublishedWeights(builder.build(), "nowhere")


def ranks(*trainers, sync=None):
    made = [TrainerRank(trainer, None, sync) for trainer in trainers]
    return Ranks(made[0], made[1:])


async def test_ranks_every_call_reaches_all_in_one_order():
    trainers = [Trainer(n, yields=n == 0) for n in range(3)]
    group = ranks(*trainers, sync=Sync())
    assert group.world_size == 3
    info = await group.forward_backward([[], [], []], ("a",), LOSS, last=True)
    assert (info.loss_sum, info.weight, info.tokens, info.rows) == (4.5, 6.0, 30, 0)
    assert info.metrics == {"trainer/clip_share": (6.0, 6.0)}
    assert (await group.optim_step()).updates == 1
    await group.zero_grad()
    await group.save("p")
    await group.load("p")
    assert (await group.export(3, 0)).manifest.version == 3
    await group.zero_grad()
    expected = [
        *("forward_backward", "optim_step", "zero_grad", "save p", "load p"),
        *("export_weights", "zero_grad"),
    ]
    assert [trainer.calls for trainer in trainers] == [expected] * 3


async def test_ranks_write_a_model_together_or_say_that_they_cannot():
    """A rank that holds a shard alone cannot write: the others have to bring theirs."""
    trainers = [Exporter(n) for n in range(3)]
    assert await ranks(*trainers).save_model("p") is True
    assert [trainer.calls for trainer in trainers] == [["save_model p"]] * 3
    assert await ranks(Trainer(0), Trainer(1)).save_model("p") is False


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_ranks_failing_rank_fails_the_call_by_number_and_frees_the_others(number):
    trainers = [
        Trainer(n, fails_in="optim_step") if n == number else Trainer(n, waits_in="optim_step")
        for n in range(3)
    ]
    with pytest.raises(ServiceError) as found:
        await asyncio.wait_for(ranks(*trainers).optim_step(), 5)
    assert str(found.value) == (
        f"trainer rank {number} of 3 failed in optim_step: CUDA out of memory"
    )
    assert found.value.service == f"trainer-{number}"
    assert isinstance(found.value.__cause__, EngineError)
    await asyncio.sleep(0)
    asked = [t for t in trainers if "optim_step" in t.calls]
    assert all(t.cancelled == ["optim_step"] for t in asked if t.number != number)


async def test_ranks_failing_in_export_is_named():
    trainers = [Trainer(0, waits_in="export_weights"), Trainer(1, fails_in="export_weights")]
    with pytest.raises(ServiceError, match="rank 1 of 2 failed in export_weights"):
        await asyncio.wait_for(ranks(*trainers).export(0, 0), 5)


async def test_ranks_sharded_export_is_one_version_that_says_who_yields_what():
    published = await ranks(Trainer(0), Trainer(1), sync=Sync()).export(4, 1)
    assert [spec.name for spec in published.manifest.tensors] == ["w0", "w1"]
    assert [(part.rank, part.locator) for part in published.parts] == [(0, {}), (1, {})]
    checksum = Checksum()
    for number in range(2):
        checksum.add(f"w{number}", "U8", (3,), np.full(3, number, np.uint8))
    assert published.manifest.checksum == checksum.hexdigest()
    assert [part.manifest.tensors[0].name for part in published.split()] == ["w0", "w1"]


async def test_ranks_rank_that_should_not_yield_is_a_bug():
    with pytest.raises(ServiceError, match=r"rank 0 of 2.*sharded_export"):
        await ranks(Trainer(0), Trainer(1)).export(0, 0)


async def test_ranks_single_rank_raises_its_error_as_it_is():
    with pytest.raises(EngineError, match="CUDA"):
        await ranks(Trainer(fails_in="zero_grad")).zero_grad()


async def test_ranks_different_updates_are_a_bug():
    with pytest.raises(InvariantError, match="different updates"):
        await ranks(Trainer(0), Trainer(1, weight=2.0)).optim_step()


@pytest.mark.parametrize("order", [1, -1])
async def test_rank_call_out_of_order_raises(order):
    rank = TrainerRank(Trainer(), None)
    with pytest.raises(InvariantError, match=f"expects call 0, got call {order}"):
        await rank.zero_grad(order)
    await rank.zero_grad(0)
    with pytest.raises(InvariantError, match="expects call 1, got call 0"):
        await rank.optim_step(0)
