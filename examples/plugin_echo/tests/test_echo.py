"""The conformance kit of core on this rollout, and a test of the stage."""

import numpy as np
import pytest
from asyncflow_echo.plugin import CAPABILITIES, BrevityOptions, EchoOptions, _brevity
from asyncflow_echo.rollout import WEIGHT, EchoRollout

from asyncflow_core.batch import Batch, Column
from asyncflow_core.parts import PartContext
from asyncflow_core.services.weight_sync import Bucket
from asyncflow_core.testing.rollout import RolloutTests


class TestEcho(RolloutTests):
    @pytest.fixture
    def unopened(self):
        return EchoRollout(EchoOptions(vocab_size=7), PartContext(name="echo"))

    @pytest.fixture
    async def service(self, unopened):
        async with unopened:
            yield unopened

    @pytest.fixture
    def capabilities(self):
        return CAPABILITIES

    @pytest.fixture
    def buckets(self):
        return lambda version: [Bucket((WEIGHT,), np.array([version], "<f4").view(np.uint8))]

    @pytest.fixture
    def prompt_ids(self):
        return np.array([5, 3], np.int32)


def test_brevity_longer_response_scores_less():
    stage = _brevity(BrevityOptions(token_cost=0.5), PartContext())
    columns = {
        "response_ids": Column.ragged([[1], [1, 2, 3]], np.int32),
        "score": Column.objects([1.0, 1.0]),
    }
    assert stage(Batch(columns))["reward"].tolist() == [0.5, -0.5]
