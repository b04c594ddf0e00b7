"""Services by hand: in this process and served in another."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import asyncflow_core as af
from asyncflow_core.batch import Batch, Column, Key
from asyncflow_core.errors import ConfigError, PluginNotFoundError
from asyncflow_core.services.rollout import GenerateRequest, SamplingParams, completions_to_batch
from asyncflow_core.services.trainer import LossSpec
from asyncflow_core.services.weight_sync import TensorSpec
from asyncflow_core.testing.aio import collect

pytestmark = pytest.mark.multiproc

EXAMPLES = Path(__file__).parents[2] / "examples" / "levels"
SAMPLING = SamplingParams(max_new_tokens=2)


def requests(count=4):
    return [
        GenerateRequest(Key(0, 0, n, 0), np.array([n], np.int32), SAMPLING, seed=n)
        for n in range(count)
    ]


def train_batch(completions):
    rows = len(completions)
    return completions_to_batch(completions, SAMPLING).with_columns(
        {
            "prompt_ids": Column.ragged([[c.key.sequence] for c in completions], np.int32),
            "advantages": Column.ragged([[1.0 - n] * 2 for n in range(rows)], np.float32),
        }
    )


@pytest.mark.parametrize("loss", ["tabular_ppo_clip", LossSpec("tabular_ppo_clip")])
async def test_open_by_hand_trains_with_a_loss_by_name(loss):
    async with (
        af.open("rollout", "tabular", vocab_size=27) as rollout,
        af.open("trainer", "tabular", vocab_size=27, lr=0.5) as trainer,
    ):
        batch = train_batch(await collect(rollout.generate(requests())))
        info = await trainer.forward_backward(batch, loss, last=True)
        assert info.rows == 4
        assert (await trainer.optim_step()).grad_norm > 0


@pytest.mark.parametrize(
    ("arguments", "idle"),
    [
        ({"plugin": "tabular", "token": "x", "timeout_s": 3.0}, "token, timeout_s"),
        ({"plugin": "tabular", "address": "ipc:///x", "vocab_size": 3}, "plugin, options"),
    ],
)
def test_open_refuses_what_would_have_no_effect(arguments, idle):
    with pytest.raises(ConfigError, match=f"^{idle} would have no effect on"):
        af.open("trainer", **arguments)


async def test_open_option_called_as_an_argument_reaches_the_plugin():
    options = {"timeout_s": -1.0}  # of the tabular trainer: the longest wait for another rank
    with pytest.raises(ConfigError, match=r"trainer\.tabular, option timeout_s"):
        async with af.open("trainer", "tabular", vocab_size=3, options=options):
            pass


async def test_unknown_kind_is_refused():
    with pytest.raises(PluginNotFoundError, match="services are data_store, rollout"):
        async with af.open("judge", "tabular"):
            pass


@pytest.fixture
def served():
    """A function that serves a service by the command line; its address and token."""
    processes = []
    with tempfile.TemporaryDirectory() as folder:

        def serve(kind, *options):
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "asyncflow_core.cli", "serve", kind, "tabular"),
                    *("--bind", f"ipc://{folder}/{kind}.sock", *options),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
            found = re.match(r"serving \w+ tabular at (\S+)", process.stdout.readline())
            return process, found[1], process.stdout.readline().split()[1]

        yield serve
        for process in processes:
            process.kill()
            process.communicate()


async def test_served_in_another_process_it_is_the_same(served):
    process, address, token = served("rollout", "vocab_size=27")
    _, trainer_address, trainer_token = served("trainer", "vocab_size=27")
    async with (
        af.open("rollout", address=address, token=token) as remote,
        af.open("rollout", "tabular", vocab_size=27) as local,
        af.open("trainer", address=trainer_address, token=trainer_token) as trainer,
    ):
        there = sorted(await collect(remote.generate(requests())), key=lambda c: c.key)
        here = sorted(await collect(local.generate(requests())), key=lambda c: c.key)
        assert [c.response_ids.tolist() for c in there] == [c.response_ids.tolist() for c in here]
        info = await trainer.forward_backward(train_batch(there), "tabular_ppo_clip", last=True)
        assert info.rows == 4
        await trainer.optim_step()
        tensor = next(iter((await weights_of(remote)).values()))
        assert tensor.shape == (27, 27)
    opening = af.open("trainer", address=address, token=token)
    with pytest.raises(ConfigError, match="serves no 'trainer'"):
        async with opening:
            pass
    assert opening._client._socket.closed
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 0
    assert "Traceback" not in process.stderr.read()


async def weights_of(rollout):
    """What it serves, name to tensor."""
    specs = [TensorSpec("model.layers.0.weight", "F64", (27, 27))]
    return {
        spec.name: bucket.tensor_bytes(spec).view(np.float64).reshape(spec.shape)
        async for bucket in rollout.read_weights(specs)
        for spec in bucket.specs
    }


async def test_empty_batch_is_allowed_by_name_too():
    async with af.open("trainer", "tabular", vocab_size=3) as trainer:
        info = await trainer.forward_backward(Batch({}, rows=0), "tabular_ppo_clip", last=True)
        assert info.rows == 0


@pytest.mark.parametrize("script", ["from_file.py", "from_python.py", "own_loop.py"])
def test_example_of_each_level_learns(script, tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / script],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(EXAMPLES.parents[1]),
            "PYTHONWARNINGS": "error::ResourceWarning",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    before, after = map(float, re.search(r"(\S+) before, (\S+) after", done.stdout).groups())
    assert before < 0.2
    assert after > 0.8
