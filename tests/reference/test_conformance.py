"""The conformance kits, run on the reference services."""

import numpy as np
import pytest

from asyncflow_core.parts import PartContext
from asyncflow_core.reference.tabular import TabularModel
from asyncflow_core.reference.tabular_rollout import (
    TABULAR_ROLLOUT,
    TabularRollout,
    TabularRolloutOptions,
)
from asyncflow_core.reference.tabular_trainer import (
    TABULAR_TRAINER,
    TabularTrainer,
    TabularTrainerOptions,
)
from asyncflow_core.reference.tabular_weights import write_weights
from asyncflow_core.reference.weight_sync import (
    MEMORY_WEIGHT_SYNC,
    MemoryWeightSync,
)
from asyncflow_core.registry import NoOptions
from asyncflow_core.services.trainer import LossSpec
from asyncflow_core.services.weight_sync import Bucket
from asyncflow_core.testing.ranks import RankedTrainer
from asyncflow_core.testing.rollout import RolloutTests
from asyncflow_core.testing.trainer import TrainerTests
from asyncflow_core.testing.weight_sync import WeightSyncTests

from .conftest import make_batch

MODEL = {"vocab_size": 7, "positions": 4, "init_scale": 1.0}


class TestTabularRollout(RolloutTests):
    @pytest.fixture
    def unopened(self):
        return TabularRollout(TabularRolloutOptions(**MODEL), PartContext(name="rollout"))

    @pytest.fixture
    async def service(self):
        options = TabularRolloutOptions(**MODEL, previous_token=True)
        async with TabularRollout(options, PartContext(name="rollout")) as service:
            yield service

    @pytest.fixture
    def capabilities(self):
        return TABULAR_ROLLOUT

    @pytest.fixture
    def buckets(self):
        def make(version):
            options = TabularRolloutOptions(**MODEL, init_seed=version, previous_token=True)
            model = TabularModel(options, PartContext())
            return [Bucket(b.specs, b.data.copy()) for b in write_weights(model, 6000)]

        return make

    @pytest.fixture
    def prompt_ids(self):
        return np.array([1, 5], np.int32)


class TestTabularTrainer(TrainerTests):
    @pytest.fixture(params=["sgd", "adam"])
    def options(self, request):
        return TabularTrainerOptions(
            **MODEL, optimizer=request.param, lr=0.1, max_grad_norm=0.5, bucket_bytes=2000
        )

    @pytest.fixture
    def unopened(self, options, registry):
        return TabularTrainer(options, PartContext(name="trainer", registry=registry))

    @pytest.fixture
    async def service(self, options, registry):
        async with TabularTrainer(options, PartContext(registry=registry)) as service:
            yield service

    @pytest.fixture
    def capabilities(self):
        return TABULAR_TRAINER

    @pytest.fixture
    def batch(self):
        return make_batch()

    @pytest.fixture
    def loss(self):
        return LossSpec("tabular_ppo_clip")

    @pytest.fixture
    def misfit_loss(self):
        return LossSpec("torchish")


def test_trainer_kit_tells_a_uniform_policy_from_an_ignored_temperature():
    kit, uniform = TrainerTests(), np.full(4, -np.log(27), np.float32)
    with pytest.raises(
        pytest.fail.Exception, match=r"every log-prob of the batch is -3\.296.*unif"
    ):
        kit.assert_temperature_seen(uniform, uniform)
    with pytest.raises(pytest.fail.Exception, match="the row's temperature is ignored"):
        kit.assert_temperature_seen(np.array([-1.0, -2.0]), np.array([-1.0, -2.0]))
    kit.assert_temperature_seen(np.array([-1.0, -2.0]), np.array([-1.2, -1.8]))


class TestTabularTrainerOnTwoRanks(TestTabularTrainer):
    @pytest.fixture
    def unopened(self, options, registry, tmp_path_factory):
        run_dir = tmp_path_factory.mktemp("ranks")
        return RankedTrainer(
            [
                TabularTrainer(
                    options,
                    PartContext(
                        name=f"trainer-{rank}",
                        rank=rank,
                        world_size=2,
                        run_dir=run_dir,
                        registry=registry,
                    ),
                )
                for rank in range(2)
            ]
        )

    @pytest.fixture
    async def service(self, unopened):
        async with unopened:
            yield unopened


class TestMemoryWeightSync(WeightSyncTests):
    @pytest.fixture
    def unopened(self):
        return MemoryWeightSync(NoOptions(), PartContext(name="weights"))

    @pytest.fixture
    async def service(self, unopened):
        async with unopened:
            yield unopened

    @pytest.fixture
    async def replica(self):
        async with MemoryWeightSync(NoOptions(), PartContext()) as replica:
            yield replica

    @pytest.fixture
    def capabilities(self):
        return MEMORY_WEIGHT_SYNC
