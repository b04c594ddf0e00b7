"""k ranks train like one."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hzp_helpers import (
    POLICY,
    free_port,
    make_batch,
    make_trainer,
    plain_logprobs,
    tiny_moe,
    weights_of,
)
from torch import distributed
from transformers import AutoModelForCausalLM

from asyncflow_core.errors import ConfigError
from asyncflow_core.parts import PartContext

HERE = Path(__file__).parent


async def started(program, *arguments):
    """Two processes, a rank each."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    path = os.pathsep.join([str(HERE), *sys.path])
    return [
        await asyncio.create_subprocess_exec(
            sys.executable,
            str(HERE / program),
            *arguments,
            env={**os.environ, **address, "RANK": str(rank), "PYTHONPATH": path},
        )
        for rank in range(2)
    ]


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "options",
    [
        {"sharded_export": True},
        {"sharding": [2, 2, 2], "micro_batch_tokens": 24, "gradient_checkpointing": True},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"sharding": "zero3", "sharded_export": True}, marks=pytest.mark.slow),
        pytest.param({"sharding": [1, 1, 2], "accumulate": "shard"}, marks=pytest.mark.slow),
        pytest.param({"sharding": [2, 1, 2], "accumulate": "shard"}, marks=pytest.mark.slow),
        pytest.param({"sharding": "ddp"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_two_ranks_give_the_updates_of_one(model_dir, tmp_path, options):
    await compare_with_one_rank(model_dir, tmp_path, options)


@pytest.mark.slow
@pytest.mark.multiproc
async def test_two_ranks_give_the_updates_of_one_with_experts(tmp_path):
    """Experts that got no token, and buffers that checkpoints hold."""
    source = tiny_moe()
    source.save_pretrained(tmp_path / "source")
    await compare_with_one_rank(tmp_path / "source", tmp_path, {"sharding": "zero3"})
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    found = dict(written.named_buffers())
    biases = {n: b for n, b in source.named_buffers() if n.endswith("e_score_correction_bias")}
    assert biases
    assert all(torch.equal(found[name], bias) for name, bias in biases.items())


async def compare_with_one_rank(model_dir, tmp_path, options):
    processes = await started("rank_process.py", str(model_dir), str(tmp_path), json.dumps(options))
    assert [await process.wait() for process in processes] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    names = [set(found["exported"]) for found in (first, second)]
    assert names[0]
    assert bool(names[1]) == bool(options.get("sharded_export"))
    assert not names[0] & names[1]
    assert first["state"] == second["state"]
    async with make_trainer(model_dir) as alone:
        assert names[0] | names[1] == set(await weights_of(alone))
        for step in range(2):
            await alone.forward_backward(make_batch(9, step), POLICY, last=True)
            update = await alone.optim_step()
        logprobs = await alone.forward(make_batch(3, 9))
        await alone.load(str(tmp_path / "saved"))
        again = await alone.forward(make_batch(3, 9))
    assert first["weight"] == update.weight
    assert first["norm"] == pytest.approx(update.grad_norm, rel=1e-4)
    batch = make_batch(3, 9)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    for row, found in enumerate(first["logprobs"]):
        np.testing.assert_allclose(found, logprobs["logprobs"][row], atol=1e-3)
        np.testing.assert_allclose(found, again["logprobs"][row], atol=1e-5)
        np.testing.assert_allclose(found, plain_logprobs(written, batch, row), atol=1e-5)


@pytest.mark.multiproc
@pytest.mark.parametrize("how", ["fail", "die"])
async def test_a_rank_lost_in_a_call_ends_the_other_long_before_its_timeout(
    model_dir, tmp_path, how
):
    processes = await started("failing_rank.py", str(model_dir), str(tmp_path), how)
    codes = [await process.wait() for process in processes]
    assert codes == [0, -signal.SIGKILL if how == "die" else 0]
    found = json.loads((tmp_path / "0.json").read_text())
    assert found
    assert all("peer" in error for error in found)
    if how == "fail":
        first, second = json.loads((tmp_path / "1.json").read_text())
        assert first == "trainer failed: RuntimeError: out of memory"
        assert "left the others after it failed (out of memory); open all ranks again" in second


@pytest.mark.multiproc
async def test_what_one_rank_refuses_fails_on_both_and_leaves_them_in_step(model_dir, tmp_path):
    processes = await started("uneven_rank.py", str(model_dir), str(tmp_path))
    assert [await process.wait() for process in processes] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    torn, half = first["errors"]
    assert "another rank failed" in torn
    assert "half an update" in half
    loss, torn, half = second["errors"]
    assert "without a gradient" in loss
    assert "failed half-way" in torn
    assert "another rank failed" in half
    async with make_trainer(model_dir) as alone:
        await alone.forward_backward(make_batch(6), POLICY, last=True)
        update = await alone.optim_step()
    for found in (first, second):
        assert found["weight"] == update.weight
        assert found["norm"] == pytest.approx(update.grad_norm, rel=1e-4)


async def test_a_process_group_of_another_size_is_refused(model_dir, tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    try:
        trainer = make_trainer(model_dir, context=PartContext(world_size=2))
        with pytest.raises(ConfigError, match=r"rank 0 of 2.*rank 0 of 1"):
            await trainer.open()
        await trainer.aclose()
    finally:
        distributed.destroy_process_group()


async def test_ranks_without_a_launcher_are_refused(model_dir, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    trainer = make_trainer(model_dir, context=PartContext(world_size=2))
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        await trainer.open()
    await trainer.aclose()
