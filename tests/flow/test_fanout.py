"""Ranks as one trainer."""

import asyncio

import numpy as np
import pytest

from asyncflow_core.batch import Batch, BatchRef, Column, GroupKey
from asyncflow_core.errors import EngineError, InvariantError, ServiceError
from asyncflow_core.flow.working.fanout import Ranks
from asyncflow_core.flow.working.rank import TrainerRank
from asyncflow_core.parts import PartContext
from asyncflow_core.reference.data_store import InProcessDataStore
from asyncflow_core.reference.tabular_trainer import TabularTrainer, TabularTrainerOptions
from asyncflow_core.services.data_store import TaskSpec
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

    async def forward(self, batch):
        await self._call("forward")
        assert not batch.rows
        return Batch({"logprobs": Column.ragged([], np.float32)})

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


class Tabular(TabularTrainer):
    """The numpy trainer; remembers the tokens it was given."""

    def __init__(self):
        options = TabularTrainerOptions(vocab_size=11, positions=3, init_scale=1.0)
        super().__init__(options, PartContext(name="trainer-0"))
        self.given = []

    async def forward(self, batch):
        self.given.append(sum(map(len, batch["response_ids"])) if batch.rows else 0)
        return await super().forward(batch)


READS = ("prompt_ids", "response_ids", "sampling")


@pytest.fixture
async def leases():
    """A store, two leases of 5 rows each, and the rows as one batch in the order of the leases."""
    async with InProcessDataStore() as store:
        task = TaskSpec("reference", READS, ("ref_logprobs",))
        await store.register(task)
        rng = np.random.default_rng(5)
        rows = Batch(
            {
                "prompt_ids": Column.ragged([[n] for n in range(10)], np.int32),
                "response_ids": Column.ragged(
                    [rng.integers(0, 11, 1 + 3 * n).astype(np.int32) for n in range(10)]
                ),
                "sampling": Column.objects([{"temperature": 1.0 + n} for n in range(10)]),
            }
        )
        await store.put(rows, keys=[GroupKey(0, 0, n) for n in range(10)])
        yield store, [await store.lease("reference", requester="r", limit_rows=5) for _ in "ab"]


@pytest.mark.parametrize("count", [1, 2, 3, 16])
async def test_ranks_forward_shares_rows_by_tokens_and_keeps_their_order(leases, count):
    store, found = leases
    # Out of order and with rows of two leases: what a caller holds need not be sorted.
    infos = [[*found[1].rows[3:], found[1].rows[0]], list(reversed(found[0].rows))]
    refs = [lease.ref(part) for lease, part in zip(reversed(found), infos, strict=True)]
    tokens = [info.tokens for part in infos for info in part]
    batch = Batch.concat([await store.read(ref, READS) for ref in refs])
    trainers = [Tabular() for _ in range(count)]
    for trainer in trainers:
        await trainer.open()
    made = [TrainerRank(trainer, store) for trainer in trainers]
    group = Ranks(made[0], made[1:])
    result = await group.forward(refs, tokens, READS)
    assert all(len(trainer.given) == 1 for trainer in trainers)
    expected = (await trainers[0].forward(batch))["logprobs"]
    assert result["logprobs"].lengths.tolist() == expected.lengths.tolist()
    np.testing.assert_array_equal(result["logprobs"].array, expected.array)
    given = [trainer.given[0] for trainer in trainers]
    longest = int(batch["response_ids"].lengths.max())
    assert max(given) <= sum(given) / count + longest
    assert sum(given) == len(batch["response_ids"].array)


async def test_ranks_forward_of_no_rows_reaches_all():
    trainers = [Trainer(n) for n in range(2)]
    assert (await ranks(*trainers).forward([], [], READS))["logprobs"].lengths.tolist() == []
    assert [trainer.calls for trainer in trainers] == [["forward"]] * 2


async def test_ranks_forward_from_several_tasks_goes_in_one_order(leases):
    store, found = leases
    trainers = [Tabular() for _ in range(2)]
    for trainer in trainers:
        await trainer.open()
    group = Ranks(TrainerRank(trainers[0], store), [TrainerRank(trainers[1], store)])
    sizes = [1, 4, 2, 5, 3]
    results = await asyncio.gather(
        *(
            group.forward([lease.ref(lease.rows[:n])], [i.tokens for i in lease.rows[:n]], READS)
            for n in sizes
            for lease in found
        )
    )
    assert [result.rows for result in results] == [n for n in sizes for _ in found]
    totals = [sum(info.tokens - 1 for info in lease.rows[:n]) for n in sizes for lease in found]
    assert [sum(pair) for pair in zip(*(t.given for t in trainers), strict=True)] == totals


async def test_ranks_forward_tokens_of_other_rows_are_a_bug():
    with pytest.raises(InvariantError, match="forward of 2 rows was given the tokens of 1"):
        await ranks(Trainer()).forward([BatchRef(0, 0, (1, 2))], [3], READS)


async def test_ranks_forward_rank_that_loses_rows_is_a_bug(leases):
    store, found = leases
    group = Ranks(TrainerRank(Lossy(), store), [TrainerRank(Lossy(), store)])
    lease = found[0]
    with pytest.raises(InvariantError, match=r"returned \[0, 0\] rows of forward, given were"):
        await group.forward([lease.ref()], [info.tokens for info in lease.rows], READS)


class Lossy(Trainer):
    """Returns no rows, whatever it is given."""

    async def forward(self, batch):
        return Batch({"logprobs": Column.ragged([], np.float32)})


class Unreadable(InProcessDataStore):
    """A store that cannot be read."""

    async def read(self, ref, columns):
        raise EngineError("disk gone")


async def test_ranks_rank_that_cannot_read_keeps_in_step_and_then_fails_the_call():
    """Ranks meet in a call: one that stays away would leave the others waiting."""
    meeting = asyncio.Barrier(2)
    trainers = [Meets(meeting) for _ in range(2)]
    group = Ranks(TrainerRank(trainers[0], None), [TrainerRank(trainers[1], Unreadable())])
    rows = [[], [BatchRef(0, 0, (1,))]]
    with pytest.raises(ServiceError, match="rank 1 of 2 failed in forward_backward: disk gone"):
        await asyncio.wait_for(group.forward_backward(rows, ("a",), LOSS, last=True), 5)
    await group.zero_grad()
    assert [trainer.calls for trainer in trainers] == [["forward_backward", "zero_grad"]] * 2


class Meets(Trainer):
    """Waits in each `forward_backward` for all ranks."""

    def __init__(self, meeting):
        super().__init__()
        self.meeting = meeting

    async def forward_backward(self, batch, loss, *, last):
        await self.meeting.wait()
        return await super().forward_backward(batch, loss, last=last)


class Silent(Trainer):
    """Returns nothing from any call, as a plugin that forgets its `return`."""

    async def forward(self, batch):
        pass

    async def forward_backward(self, batch, loss, *, last):
        pass

    async def optim_step(self):
        pass


@pytest.mark.parametrize(
    ("call", "arguments", "kind"),
    [
        ("forward", (0, (), ()), "Batch"),
        ("forward_backward", (0, (), (), LOSS), "ForwardBackwardInfo"),
        ("optim_step", (0,), "UpdateInfo"),
    ],
)
async def test_trainer_that_returns_nothing_is_named_with_what_it_must_return(
    call, arguments, kind
):
    rank = TrainerRank(Silent(), None)
    more = {"last": True} if call == "forward_backward" else {}
    with pytest.raises(EngineError, match=f"{call} returned None; it must return a {kind} "):
        await getattr(rank, call)(*arguments, **more)


@pytest.mark.parametrize("order", [1, -1])
async def test_rank_call_out_of_order_raises(order):
    rank = TrainerRank(Trainer(), None)
    with pytest.raises(InvariantError, match=f"expects call 0, got call {order}"):
        await rank.zero_grad(order)
    await rank.zero_grad(0)
    with pytest.raises(InvariantError, match="expects call 1, got call 0"):
        await rank.optim_step(0)


class SlowExporter(Trainer):
    """Its export goes on when it is told to."""

    def __init__(self):
        super().__init__()
        self.go_on = asyncio.Event()

    async def export_weights(self, version):
        await self._call("export_weights")
        await self.go_on.wait()
        yield Bucket((TensorSpec("w", "U8", (3,)),), np.full(3, self.calls.count("optim_step")))


async def test_overlapped_export_runs_beside_gradients_and_before_the_update():
    trainer = SlowExporter()
    group = Ranks(TrainerRank(trainer, None, Sync()), overlaps_export=True)
    exporting = asyncio.create_task(group.export(1, 0))
    await asyncio.sleep(0)
    await group.forward_backward([[]], (), LOSS, last=True)
    updating = asyncio.create_task(group.optim_step())
    following = asyncio.create_task(group.export(2, 0))
    await asyncio.sleep(0.05)
    assert trainer.calls == ["export_weights", "forward_backward"]
    assert not exporting.done()
    assert not updating.done()
    trainer.go_on.set()
    assert (await exporting).manifest.version == 1
    await updating
    assert (await following).manifest.version == 2


async def test_overlapped_export_that_fails_lets_the_update_go_on():
    trainer = Trainer(fails_in="export_weights")
    group = Ranks(TrainerRank(trainer, None, Sync()), overlaps_export=True)
    with pytest.raises(EngineError):
        await group.export(1, 0)
    assert (await group.optim_step()).updates == 1


def test_overlapped_export_of_several_ranks_is_refused():
    made = [TrainerRank(Trainer(n), None, Sync()) for n in range(2)]
    with pytest.raises(InvariantError, match="collective"):
        Ranks(made[0], made[1:], overlaps_export=True)
