"""The conformance kit of core on this trainer, alone and on two ranks."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hzp_helpers import POLICY, free_port, make_batch, make_trainer

from asyncflow_core.services.trainer import LossSpec
from asyncflow_core.testing.ranks import RankedTrainer, connect_rank
from asyncflow_core.testing.trainer import TrainerTests
from asyncflow_hzp.plugin import CAPABILITIES

# AdamW's first step is about the sign of the gradient, which rounding can turn where it is near 0:
# the rate is small enough for such a turn to stay within the tolerance.
LR = 1e-5


class HzpTests(TrainerTests):
    @pytest.fixture
    def unopened(self, model_dir):
        return make_trainer(model_dir)

    @pytest.fixture
    def capabilities(self):
        return CAPABILITIES

    @pytest.fixture
    def batch(self):
        return make_batch(6)

    @pytest.fixture
    def loss(self):
        return POLICY

    @pytest.fixture
    def misfit_loss(self):
        return LossSpec("numpy")


class TestHzpTrainer(HzpTests):
    @pytest.fixture
    async def service(self, model_dir):
        async with make_trainer(model_dir, lr=LR) as service:
            yield service


@pytest.fixture(scope="class")
def addresses(request, model_dir, tmp_path_factory):
    """Two processes for all tests of the class."""
    folder = tmp_path_factory.mktemp("ranks")
    folder.chmod(0o700)
    here = Path(__file__).parent
    options = json.dumps({"lr": LR, **request.cls.options()})
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "PYTHONPATH": os.pathsep.join([str(here), *sys.path]),
    }
    found, children = [], []
    for rank in range(2):
        address = f"ipc://{folder}/rank-{rank}"
        program = [sys.executable, str(here / "conformance_rank.py")]
        children.append(
            subprocess.Popen(
                [*program, str(model_dir), address, options],
                stdin=subprocess.PIPE,
                env={**os.environ, **common, "RANK": str(rank)},
            )
        )
        found.append(address)
    yield found
    for child in children:
        child.stdin.close()
    assert [child.wait(60) for child in children] == [0, 0]


@pytest.mark.multiproc
class TestHzpTrainerOnTwoRanks(HzpTests):
    """Parameters, gradients and optimizer state in halves, each rank a process."""

    @staticmethod
    def options():
        return {"sharding": "zero3", "sharded_export": True}

    @pytest.fixture
    def capabilities(self):
        return replace(CAPABILITIES, sharded_export="sharded_export" in self.options())

    @pytest.fixture
    async def unopened(self, addresses):
        connected = await asyncio.gather(*map(connect_rank, addresses))
        clients, ranks, lives = zip(*connected, strict=True)
        yield RankedTrainer(ranks, lives)
        for client in clients:
            await client.aclose()

    @pytest.fixture
    async def service(self, unopened):
        async with unopened:
            yield unopened


@pytest.mark.slow
class TestHzpTrainerOnTwoRanksMixed(TestHzpTrainerOnTwoRanks):
    """Whole parameters, split gradients, which are reduced with each micro-batch."""

    @staticmethod
    def options():
        return {"sharding": [1, 2, 2], "accumulate": "shard"}
