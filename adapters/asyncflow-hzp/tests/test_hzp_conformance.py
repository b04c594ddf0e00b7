"""The conformance kit of core on this trainer."""

import pytest
from hzp_helpers import POLICY, make_batch, make_trainer

from asyncflow_core.services.trainer import LossSpec
from asyncflow_core.testing.trainer import TrainerTests
from asyncflow_hzp.plugin import CAPABILITIES


class TestHzpTrainer(TrainerTests):
    @pytest.fixture
    async def service(self, model_dir):
        # AdamW's first step is about the sign of the gradient, which rounding can turn where it is
        # near 0: the rate is small enough for such a turn to stay within the tolerance.
        async with make_trainer(model_dir, lr=1e-5) as service:
            yield service

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
