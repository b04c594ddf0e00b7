"""The trainer's log-probs, gradients and updates."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from hzp_helpers import (
    POLICY,
    VOCAB,
    make_batch,
    make_trainer,
    plain_logprobs,
    tiny_qwen3,
    weights_of,
)
from transformers import AutoModelForCausalLM

from asyncflow_core.batch import Batch, Column
from asyncflow_core.errors import (
    ConfigError,
    DataError,
    EngineError,
    ServiceClosedError,
    ServiceError,
)
from asyncflow_core.services.trainer import LossSpec
from asyncflow_hzp.forward import split_rows
from asyncflow_hzp.layout import Sizes
from asyncflow_hzp.model import choose_device
from asyncflow_hzp.options import HzpOptions
from asyncflow_hzp.planning import plan
from asyncflow_hzp.schedule import learning_rate
from asyncflow_hzp.sharding import trainer_config


@pytest.fixture
async def trainer(model_dir):
    async with make_trainer(model_dir) as service:
        yield service


def concat_logprobs(batch):
    return np.concatenate(list(batch["logprobs"]))


async def one_update(trainer, batches):
    infos = [await trainer.forward_backward(b, "policy", last=False) for b in batches]
    return infos, await trainer.optim_step()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_forward_equals_plain_forward_of_each_row(trainer, model_dir, temperature):
    batch = make_batch(temperature=temperature)
    found = await trainer.forward(batch)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    for row in range(batch.rows):
        expected = plain_logprobs(model, batch, row, temperature or 1.0)
        np.testing.assert_allclose(found["logprobs"][row], expected, atol=1e-5)


async def test_forward_split_into_small_forwards_keeps_rows_in_place(trainer, model_dir):
    batch = make_batch(rows=20)
    async with make_trainer(model_dir, micro_batch_tokens=16) as small:
        found = await small.forward(batch)
    np.testing.assert_allclose(
        concat_logprobs(found), concat_logprobs(await trainer.forward(batch)), atol=1e-5
    )


async def test_forward_chunked_logits_equal_whole_ones(trainer, monkeypatch, model_dir):
    batch = make_batch(rows=10)
    whole = await one_update(trainer, [batch])
    monkeypatch.setattr("asyncflow_hzp.forward._CHUNK_LOGITS", 5 * VOCAB)
    async with make_trainer(model_dir) as chunked:
        infos, update = await one_update(chunked, [batch])
    assert infos[0].loss_sum == pytest.approx(whole[0][0].loss_sum, rel=1e-5)
    assert update.grad_norm == pytest.approx(whole[1].grad_norm, rel=1e-5)


async def test_forward_backward_gradient_equals_autograd_on_the_plain_model(trainer, model_dir):
    batch = make_batch()
    _, update = await one_update(trainer, [batch])
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    total = torch.zeros(())
    for row in range(batch.rows):
        entry = {name: torch.tensor(batch[name][row]) for name in batch if name != "sampling"}
        ids = torch.cat([entry["prompt_ids"], entry["response_ids"]]).long()[None]
        logits = model(input_ids=ids).logits[0, len(entry["prompt_ids"]) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, entry["response_ids"].long()[:, None])[:, 0]
        ratio = (logprobs - entry["behaviour_logprobs"]).exp()
        total = total - (ratio * entry["advantages"] * entry["loss_mask"]).sum()
    weight = float(batch["loss_mask"].array.sum())
    (total / weight).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert update.grad_norm == pytest.approx(float(norm), rel=1e-4)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8).step()
    for name, (_, data) in (await weights_of(trainer)).items():
        expected = model.get_parameter(name).detach().numpy()
        found = np.frombuffer(data, np.float32).reshape(expected.shape)
        # The first step of AdamW is about the gradient's sign, which rounding can move.
        assert np.mean(np.abs(found - expected) > 1e-4) < 1e-3, name


@pytest.mark.parametrize("parts", [2, 5])
async def test_micro_batches_give_the_update_of_one_batch(trainer, model_dir, parts):
    batch = make_batch(rows=10)
    _, expected = await one_update(trainer, [batch])
    async with make_trainer(model_dir) as other:
        pieces = [batch.take(rows) for rows in np.array_split(np.arange(10), parts)]
        _, update = await one_update(other, [*pieces, batch.take([])])
        assert update.weight == expected.weight
        assert update.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        logprobs = concat_logprobs(await other.forward(batch))
    np.testing.assert_allclose(logprobs, concat_logprobs(await trainer.forward(batch)), atol=1e-3)


async def test_splitting_inside_changes_nothing(trainer, model_dir):
    batch = make_batch(rows=20)
    infos, expected = await one_update(trainer, [batch])
    async with make_trainer(model_dir, micro_batch_tokens=24) as small:
        small_infos, update = await one_update(small, [batch])
    assert small_infos[0].loss_sum == pytest.approx(infos[0].loss_sum, rel=1e-5)
    assert small_infos[0].metrics["ratio"] == pytest.approx(infos[0].metrics["ratio"], rel=1e-5)
    assert (small_infos[0].tokens, small_infos[0].rows) == (infos[0].tokens, infos[0].rows)
    assert update.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


async def test_equal_calls_give_bit_equal_weights(model_dir):
    results = []
    for _ in range(2):
        async with make_trainer(model_dir, micro_batch_tokens=64) as trainer:
            for step in range(2):
                await one_update(trainer, [make_batch(20, step)])
            results.append(await weights_of(trainer))
    assert {n: d for n, (_, d) in results[0].items()} == {n: d for n, (_, d) in results[1].items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_training_raises_the_probability_of_advantageous_tokens(model_dir, dtype):
    batch = make_batch()
    ones = Column.ragged([np.ones(n, np.float32) for n in batch["response_ids"].lengths])
    mask = Column(np.ones(len(ones.array), np.uint8), ones.offsets)
    batch = batch.with_columns({"advantages": ones, "loss_mask": mask})
    async with make_trainer(model_dir, dtype=dtype) as trainer:
        before = concat_logprobs(await trainer.forward(batch)).mean()
        for _ in range(5):
            await one_update(trainer, [batch])
        assert concat_logprobs(await trainer.forward(batch)).mean() > before + 0.5


async def test_gradient_checkpointing_changes_nothing(trainer, model_dir):
    batch = make_batch()
    _, expected = await one_update(trainer, [batch])
    async with make_trainer(model_dir, gradient_checkpointing=True) as other:
        _, update = await one_update(other, [batch])
    assert update.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)


async def test_gradient_checkpointing_with_dropout_is_refused(model_dir):
    trainer = make_trainer(
        model_dir, gradient_checkpointing=True, engine_args={"attention_dropout": 0.1}
    )
    with pytest.raises(ConfigError, match=r"attention_dropout.*engine_args"):
        await trainer.open()
    await trainer.aclose()


async def test_entropy_is_given_to_losses_that_need_it(trainer, model_dir):
    batch = make_batch()
    info = await trainer.forward_backward(batch, LossSpec("entropy"), last=True)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    expected = 0.0
    for row in range(batch.rows):
        prompt, response = batch["prompt_ids"][row], batch["response_ids"][row]
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        with torch.no_grad():
            every = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected += float(-(every.exp() * every).sum())
    assert -info.loss_sum == pytest.approx(expected, rel=1e-5)
    assert (await trainer.optim_step()).grad_norm > 0


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
async def test_truncated_rows_are_refused_by_row(trainer, cut):
    batch = make_batch()
    entries = [dict(entry) for entry in batch["sampling"]]
    entries[3].update(cut)
    batch = batch.with_columns({"sampling": Column.objects(entries)})
    with pytest.raises(DataError, match="row 3"):
        await trainer.forward(batch)
    with pytest.raises(DataError, match="row 3"):
        await trainer.forward_backward(batch, POLICY, last=True)
    assert not (await trainer.optim_step()).applied


@pytest.mark.parametrize(
    ("column", "rows", "match"),
    [
        ("prompt_ids", [[1], [], [2]], "row 1: the prompt is empty"),
        ("response_ids", [[1], [2], [VOCAB]], f"row 2.*{VOCAB}"),
        ("response_ids", [[1], [-1], [2]], "row 1.*-1"),
        ("prompt_ids", [[1], [1] * 128, [2]], "row 1.*at most 128"),
    ],
)
async def test_bad_rows_are_refused_by_row(trainer, column, rows, match):
    names = {"prompt_ids": [[1], [2], [3]], "response_ids": [[1], [2], [3]], column: rows}
    batch = Batch({name: Column.ragged(entry, np.int32) for name, entry in names.items()})
    with pytest.raises(DataError, match=match):
        await trainer.forward(batch)


async def test_a_missing_column_is_refused_before_anything_is_added(trainer):
    batch = make_batch().select(["prompt_ids", "response_ids", "loss_mask", "sampling"])
    with pytest.raises(DataError, match="behaviour_logprobs"):
        await trainer.forward_backward(batch, POLICY, last=True)
    assert not (await trainer.optim_step()).applied


async def test_nan_gradient_is_an_error_and_changes_nothing(trainer):
    before = await weights_of(trainer)
    await trainer.forward_backward(make_batch(), LossSpec("nan"), last=True)
    with pytest.raises(EngineError, match="update 1"):
        await trainer.optim_step()
    assert await weights_of(trainer) == before
    _, update = await one_update(trainer, [make_batch()])
    assert update.updates == 1
    assert np.isfinite(update.grad_norm)


async def test_a_loss_without_gradient_tears_the_update(trainer):
    with pytest.raises(EngineError, match="without a gradient"):
        await trainer.forward_backward(make_batch(), LossSpec("detached"), last=True)
    with pytest.raises(ServiceError, match="zero_grad"):
        await trainer.optim_step()
    await trainer.zero_grad()
    _, update = await one_update(trainer, [make_batch()])
    assert update.applied


async def test_a_numpy_loss_is_refused(trainer):
    with pytest.raises(ConfigError, match="numpy"):
        await trainer.forward_backward(make_batch(), LossSpec("numpy"), last=True)


async def test_zero_grad_forgets_what_was_collected(trainer, model_dir):
    await trainer.forward_backward(make_batch(seed=5), POLICY, last=True)
    await trainer.zero_grad()
    _, update = await one_update(trainer, [make_batch()])
    async with make_trainer(model_dir) as other:
        _, expected = await one_update(other, [make_batch()])
    assert (update.grad_norm, update.weight) == (expected.grad_norm, expected.weight)


async def test_empty_batch_adds_nothing(trainer):
    empty = make_batch().take([])
    assert (await trainer.forward(empty)).rows == 0
    info = await trainer.forward_backward(empty, POLICY, last=True)
    assert (info.rows, info.weight) == (0, 0.0)
    update = await trainer.optim_step()
    assert (update.applied, update.updates) == (False, 0)


async def test_a_frozen_trainer_computes_log_probs_and_holds_nothing_else(trainer, model_dir):
    batch = make_batch()
    async with make_trainer(model_dir, frozen=True) as frozen:
        found = await frozen.forward(batch)
        assert await weights_of(frozen) == await weights_of(trainer)
        for call in (
            frozen.forward_backward(batch, POLICY, last=True),
            frozen.optim_step(),
            frozen.save("nowhere"),
            frozen.load("nowhere"),
        ):
            with pytest.raises(ServiceError, match=r"frozen trainer.*frozen: false"):
                await call
        units = frozen._engine._shards._model.units
        assert all(
            unit.grad is None and unit.master.data_ptr() == unit.held.data_ptr() for unit in units
        )
        assert not frozen._engine._shards._optimizer._inner
    np.testing.assert_array_equal(
        concat_logprobs(found), concat_logprobs(await trainer.forward(batch))
    )


async def test_calls_outside_of_open_are_refused(model_dir):
    trainer = make_trainer(model_dir)
    with pytest.raises(ServiceClosedError):
        await trainer.forward(make_batch())
    await trainer.open()
    await trainer.aclose()
    await trainer.aclose()
    with pytest.raises(ServiceClosedError):
        await trainer.stats()


async def test_a_cancelled_call_leaves_the_trainer_usable(trainer):
    task = asyncio.create_task(trainer.forward_backward(make_batch(200), POLICY, last=True))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await trainer.zero_grad()
    infos, update = await one_update(trainer, [make_batch()])
    assert update.weight == infos[0].weight
    stats = await trainer.stats()
    assert stats.updates == 1
    assert stats.busy_s > 0


async def test_open_without_a_model_names_the_path(tmp_path):
    trainer = make_trainer(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="nowhere"):
        await trainer.open()
    await trainer.aclose()


def test_schedule_warms_up_and_ends_at_zero():
    options = HzpOptions(model="m", lr=1.0, warmup_updates=4, schedule="linear", total_updates=8)
    rates = [learning_rate(options, update) for update in range(9)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    short = HzpOptions(model="m", lr=1.0, warmup_updates=4, schedule="linear", total_updates=2)
    assert [learning_rate(short, n) for n in range(2)] == [0.25, 0.5]  # it only climbs
    cosine = HzpOptions(model="m", lr=1.0, schedule="cosine", total_updates=4)
    assert [round(learning_rate(cosine, u), 3) for u in (0, 2, 4, 9)] == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"betas": (0.9, 1.0)}, r"betas are \[0.9, 1.0\]"),
        ({"betas": (-0.1, 0.9)}, "at least 0"),
        ({"lr": float("inf")}, "finite"),
        ({"grad_clip": float("nan")}, "finite"),
        ({"collective_timeout_s": float("inf")}, "finite"),
    ],
)
def test_numbers_that_cannot_train_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        HzpOptions(model="m", **changes)


@pytest.mark.parametrize("accumulate", ["full", "shard"])
def test_auto_leaves_room_for_gradients_of_micro_batches_that_add_up(accumulate):
    model = tiny_qwen3()
    config = trainer_config(model, HzpOptions(model="m", accumulate=accumulate))
    psi = sum(parameter.numel() for parameter in model.parameters())
    several, one = (
        {row.sizes: row.memory_bytes for row in plan(model, chosen, world_size=4).rows}
        for chosen in (config, replace(config, micro_batches=1))
    )
    sums = {sizes: several[sizes] - one[sizes] for sizes in one}
    assert sums[Sizes(1, 1, 1)] == 0  # they add up where the optimizer looks for them
    assert sums[Sizes(1, 1, 4)] == 4 * psi
    assert sums[Sizes(4, 4, 4)] == (4 * psi if accumulate == "full" else psi)


def test_device_without_a_number_is_the_ranks_own(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device("cuda") == torch.device("cuda", 3)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert choose_device("cpu") == torch.device("cpu")


def test_schedule_without_total_is_refused():
    with pytest.raises(ValueError, match="total_updates"):
        HzpOptions(model="m", schedule="cosine")


def test_split_rows_bounds_tokens_and_padding():
    lengths = np.array([3, 50, 4, 5, 60, 3, 2, 49])
    parts = split_rows(lengths, 120)
    assert sorted(np.concatenate(parts).tolist()) == list(range(8))
    for rows in parts:
        padded = len(rows) * lengths[rows].max()
        assert padded <= 120
        assert padded - lengths[rows].sum() <= 30
    assert [rows.tolist() for rows in split_rows(np.array([5, 4]), 10)] == [[0, 1]]
