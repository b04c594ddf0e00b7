import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncflow_core.batch import Column
from asyncflow_core.errors import (
    ConfigError,
    DataError,
    EngineError,
    PluginLoadError,
    ServiceError,
    ServiceTimeoutError,
)
from asyncflow_core.losses import resolve_loss
from asyncflow_core.parts import PartContext
from asyncflow_core.reference.tabular_trainer import TabularTrainer, TabularTrainerOptions
from asyncflow_core.registry import Plugin, Registry
from asyncflow_core.services.trainer import LossOutput, LossSpec, loss_columns

from .conftest import SAMPLING, make_batch

PPO = LossSpec("tabular_ppo_clip")


def trainer(registry, *, rank=0, world_size=1, run_dir=None, **options):
    merged = {"vocab_size": 7, "positions": 3, "init_scale": 1.0, **options}
    ctx = PartContext(
        name=f"trainer-{rank}", rank=rank, world_size=world_size, run_dir=run_dir, registry=registry
    )
    return TabularTrainer(TabularTrainerOptions(**merged), ctx)


async def test_forward_equals_independent_computation(registry):
    batch = make_batch()
    sampling = [{**SAMPLING, "temperature": t} for t in (1.0, 0.5, 2.0, 1.0, 0.0, 3.0)]
    batch = batch.with_columns({"sampling": Column.objects(sampling)})
    async with trainer(registry) as service:
        logits = service._model.logits
        column = (await service.forward(batch))["logprobs"]
    for row, temperature in enumerate((1.0, 0.5, 2.0, 1.0, 1.0, 3.0)):
        last = batch["prompt_ids"][row][-1]
        for position, token in enumerate(batch["response_ids"][row]):
            z = logits[min(position, 2), last] / temperature
            expected = z[token] - np.log(np.exp(z).sum())
            assert column[row][position] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("previous", [False, True])
async def test_gradient_equals_finite_differences_of_the_loss(registry, previous):
    batch = make_batch(rows=8, seed=3)
    sampling = [{**SAMPLING, "temperature": t} for t in (1.0, 0.5, 2.0, 1.5) * 2]
    batch = batch.with_columns({"sampling": Column.objects(sampling)})
    async with trainer(registry, previous_token=previous) as service:

        async def loss():
            await service.zero_grad()
            return (await service.forward_backward(batch, PPO, last=True)).loss_sum

        await loss()
        grad, logits = service._grad.copy(), service._model.logits
        touched = np.argwhere(np.abs(grad) > 0)
        assert len(touched) > 20
        for index in map(tuple, touched):
            at = logits[index]
            logits[index] = at + 1e-6
            up = await loss()
            logits[index] = at - 1e-6
            down = await loss()
            logits[index] = at
            assert grad[index] == pytest.approx((up - down) / 2e-6, abs=1e-6)


async def test_micro_batches_in_order_bit_equal(registry):
    batch = make_batch()
    grads = []
    for size in (6, 3, 1):
        async with trainer(registry) as service:
            for first in range(0, 6, size):
                part = batch.take(range(first, first + size))
                await service.forward_backward(part, PPO, last=False)
            grads.append((service._grad.tobytes(), service._weight))
    assert grads[0] == grads[1] == grads[2]


async def test_ranks_in_one_process_equal_one_rank(registry, tmp_path):
    batch = make_batch()
    async with trainer(registry) as alone:
        await alone.forward_backward(batch, PPO, last=True)
        expected = await alone.optim_step()
        logits = alone._model.logits
    ranks = [trainer(registry, rank=r, world_size=3, run_dir=tmp_path) for r in range(3)]
    try:
        for rank in ranks:
            await rank.open()
        # Rank 2 has no rows.
        for rank, rows in zip(ranks, ([0, 2, 4, 5], [1, 3], []), strict=True):
            await rank.forward_backward(batch.take(rows), PPO, last=True)
        infos = await asyncio.gather(*(rank.optim_step() for rank in ranks))
        assert infos[0] == infos[1] == infos[2]
        assert infos[0].weight == expected.weight
        assert len({rank._model.logits.tobytes() for rank in ranks}) == 1
        np.testing.assert_allclose(ranks[0]._model.logits, logits, atol=1e-14)
        exported = [[b async for b in rank.export_weights(1)] for rank in ranks]
        assert [len(buckets) for buckets in exported] == [1, 0, 0]
    finally:
        for rank in ranks:
            await rank.aclose()


@pytest.mark.multiproc
async def test_rank_processes_bit_equal_and_equal_one_rank(tmp_path):
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": str(here.parents[1]), "OMP_NUM_THREADS": "1"}

    def run(world_size):
        run_dir = tmp_path / str(world_size)
        run_dir.mkdir()
        processes = [
            subprocess.Popen(
                [sys.executable, here / "rank_process.py", str(r), str(world_size), run_dir],
                env=env,
            )
            for r in range(world_size)
        ]
        assert [process.wait(60) for process in processes] == [0] * world_size
        return [np.load(run_dir / f"logits-{r}.npy") for r in range(world_size)]

    (alone,) = run(1)
    first, second = run(2)
    assert first.tobytes() == second.tobytes()
    assert np.abs(first).max() > 0.1
    np.testing.assert_allclose(first, alone, atol=1e-9)


async def test_rank_missing_named_before_the_deadline_ends(registry, tmp_path):
    ranks = [
        trainer(registry, rank=r, world_size=3, run_dir=tmp_path, timeout_s=0.2) for r in (0, 1)
    ]
    try:
        for rank in ranks:
            await rank.open()
            await rank.forward_backward(make_batch(), PPO, last=True)
        failures = await asyncio.gather(*(r.optim_step() for r in ranks), return_exceptions=True)
        assert all(isinstance(failure, ServiceTimeoutError) for failure in failures)
        assert "rank 2 in all-reduce 1" in str(failures[0])
        assert "for rank 0" in str(failures[1])
        assert all(rank._weight > 0 for rank in ranks)
    finally:
        for rank in ranks:
            await rank.aclose()


def test_ranks_without_directory_or_with_long_path_refused(registry, tmp_path):
    with pytest.raises(ConfigError, match="run directory"):
        trainer(registry, world_size=2)
    with pytest.raises(ConfigError, match="longer"):
        trainer(registry, world_size=2, run_dir=tmp_path / ("x" * 100))
    with pytest.raises(ConfigError, match="rank 2"):
        trainer(registry, rank=2, world_size=2, run_dir=tmp_path)


async def test_adam_first_step_is_the_sign_times_lr(registry):
    async with trainer(registry, optimizer="adam", lr=0.01) as service:
        before = service._model.logits
        await service.forward_backward(make_batch(), PPO, last=True)
        grad = service._grad.copy() / service._weight
        await service.optim_step()
        step = before - service._model.logits
    np.testing.assert_allclose(step, 0.01 * grad / (np.abs(grad) + 1e-8), rtol=1e-6, atol=1e-15)


async def test_clip_scales_to_the_norm_and_reports_the_one_before(registry):
    async with trainer(registry, lr=1.0, max_grad_norm=1e-3) as service:
        before = service._model.logits
        await service.forward_backward(make_batch(), PPO, last=True)
        grad = service._grad / service._weight
        norm = np.linalg.norm(grad)
        info = await service.optim_step()
        assert info.grad_norm == pytest.approx(norm)
        assert np.linalg.norm(before - service._model.logits) == pytest.approx(1e-3)


async def test_gradient_not_finite_parameters_untouched(registry):
    batch = make_batch()
    bad = batch["behaviour_logprobs"].array - np.float32(3e38)
    column = Column(bad, batch["response_ids"].offsets)
    async with trainer(registry) as service:
        before = service._model.logits.tobytes()
        with np.errstate(all="ignore"):
            part = batch.with_columns({"behaviour_logprobs": column})
            await service.forward_backward(part, PPO, last=True)
            with pytest.raises(EngineError, match="gradient"):
                await service.optim_step()
        assert service._model.logits.tobytes() == before
        await service.zero_grad()
        assert not (await service.optim_step()).applied


async def test_save_with_collected_gradients_refused(registry, tmp_path):
    async with trainer(registry) as service:
        await service.forward_backward(make_batch(), PPO, last=True)
        with pytest.raises(ServiceError, match="gradients"):
            await service.save(str(tmp_path / "state"))


async def test_load_other_shape_optimizer_or_damage_named(registry, tmp_path):
    path = str(tmp_path / "state")
    async with trainer(registry) as service:
        await service.save(path)
    async with trainer(registry, positions=4) as service:
        with pytest.raises(DataError, match=r"logits.npy is float64 \[3, 7, 7\]"):
            await service.load(path)
    async with trainer(registry, optimizer="adam") as service:
        with pytest.raises(DataError, match="optimizer 'sgd'"):
            await service.load(path)
    (tmp_path / "state" / "record.msgpack").write_bytes(b"\xc1")
    async with trainer(registry) as service:
        with pytest.raises(DataError, match="not a checkpoint"):
            await service.load(path)


async def test_export_first_weights_stay_while_training_goes_on(registry):
    batch = make_batch()
    async with trainer(registry, bucket_bytes=1) as service:
        expected = service._model.logits.copy()
        tensors = []
        async for bucket in service.export_weights(0):
            (spec,) = bucket.specs
            tensors.append(bucket.tensor_bytes(spec).copy().view(np.float64).reshape(spec.shape))
            await service.forward_backward(batch, PPO, last=True)
            await service.optim_step()
        assert np.stack(tensors).tobytes() == expected.tobytes()
        with pytest.raises(DataError, match="version -1"):
            await anext(service.export_weights(-1))


async def test_batch_without_sampling_refused(registry):
    batch = make_batch()
    async with trainer(registry) as service:
        with pytest.raises(DataError, match="'sampling'"):
            await service.forward(batch.select([n for n in batch if n != "sampling"]))


def test_resolve_loss_bound_to_its_options(registry):
    loss = resolve_loss(registry, LossSpec("tabular_ppo_clip", {"clip_high": 5}), arrays="numpy")
    columns = loss_columns(make_batch(), loss.capabilities.reads)
    assert isinstance(loss(columns["behaviour_logprobs"] + 1.0, columns), LossOutput)
    assert loss.options.clip_high == 5.0


def test_resolve_loss_entropy_or_capabilities_missing_refused(registry):
    from types import ModuleType

    from asyncflow_core.hookspecs import hookimpl
    from asyncflow_core.services.trainer import LossCapabilities

    module = ModuleType("losses")

    @hookimpl
    def asyncflow_register(registrar):
        needs = LossCapabilities(arrays="numpy", needs_entropy=True)
        registrar.add("loss", "wants", lambda *a: len, api_version=1, capabilities=needs)
        registrar.add("loss", "mute", lambda *a: len, api_version=1)

    module.asyncflow_register = asyncflow_register
    made = Registry([])
    made.add(module)
    with pytest.raises(ConfigError, match="entropy"):
        resolve_loss(made, LossSpec("wants"), arrays="numpy")
    assert resolve_loss(made, LossSpec("wants"), arrays="numpy", entropy=True).loss is len
    with pytest.raises(PluginLoadError, match="LossCapabilities"):
        resolve_loss(made, LossSpec("mute"), arrays="numpy")
    assert isinstance(made.get("loss", "mute"), Plugin)
