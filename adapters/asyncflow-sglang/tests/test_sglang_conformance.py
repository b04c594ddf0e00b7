"""The conformance kit of core on this rollout, with a real SGLang server."""

import numpy as np
import pytest
from sglang_helpers import PROMPT, make_buckets, make_options, make_rollout, versioned_model

from asyncflow_core.testing.rollout import RolloutTests
from asyncflow_sglang.plugin import capabilities

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]


class TestSGLangRollout(RolloutTests):
    logprob_tolerance = 1e-5
    long_tokens = 400

    @pytest.fixture
    async def service(self, model, server):
        server.slow_down(0.005)  # so that a switch lands between the tokens of a tiny model
        async with make_rollout(model, addresses=(server.url,), stream_interval=1) as service:
            yield service

    @pytest.fixture
    def unopened(self, model):
        return make_rollout(model, addresses=("http://127.0.0.1:9",))

    @pytest.fixture
    def capabilities(self, model):
        return capabilities(make_options(model, addresses=("http://127.0.0.1:9",)))

    @pytest.fixture
    def buckets(self, model):
        return lambda version: make_buckets(versioned_model(model, version))

    @pytest.fixture
    def prompt_ids(self):
        return np.array(PROMPT, np.int32)
