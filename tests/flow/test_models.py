"""A model of a stage's own, as the stage's function sees it."""

import asyncio

import numpy as np
import pytest

from asyncflow_core.errors import InvariantError
from asyncflow_core.flow.working.models import StageModel
from asyncflow_core.services.rollout import Completion, SamplingParams


class Engine:
    """Answers with the prompt; some requests not at all."""

    def __init__(self, but=()):
        self._but = but

    async def generate(self, requests):
        for number, request in reversed(list(enumerate(requests))):
            if number not in self._but:
                ids = request.prompt_ids
                logprobs = np.zeros(len(ids), np.float32)
                yield Completion(request.key, ids, logprobs, np.array([[0, len(ids)]]), "stop")


async def answers(engine, prompts):
    model = StageModel(engine, SamplingParams(), None, 0, asyncio.get_running_loop())
    return await asyncio.to_thread(model.generate_ids, prompts)


async def test_answers_are_in_the_order_of_the_prompts_however_they_end():
    prompts = [np.array([n], np.int32) for n in range(4)]
    assert [ids.tolist() for ids in await answers(Engine(), prompts)] == [[0], [1], [2], [3]]


async def test_engine_that_leaves_a_request_out_is_named():
    prompts = [np.array([n], np.int32) for n in range(4)]
    with pytest.raises(InvariantError, match=r"the model answered 3 of 4 requests"):
        await answers(Engine(but=(2,)), prompts)
