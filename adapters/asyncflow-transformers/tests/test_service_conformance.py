"""The conformance kit of core on this rollout."""

import numpy as np
import pytest
from rollout_helpers import make_buckets, make_rollout, versioned_model

from asyncflow_core.testing.rollout import RolloutTests
from asyncflow_transformers.plugin import CAPABILITIES


class TestTransformersRollout(RolloutTests):
    logprob_tolerance = 1e-5

    @pytest.fixture
    async def service(self, model_dir):
        async with make_rollout(model_dir) as service:
            yield service

    @pytest.fixture
    def unopened(self, model_dir):
        return make_rollout(model_dir)

    @pytest.fixture
    def capabilities(self):
        return CAPABILITIES

    @pytest.fixture
    def buckets(self, model_dir):
        return lambda version: make_buckets(versioned_model(model_dir, version))

    @pytest.fixture
    def prompt_ids(self):
        return np.array([5, 3, 7], np.int32)
