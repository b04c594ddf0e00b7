"""What a CPU cannot show: CUDA kernels, NCCL, tensor parallel ranks, seeds. Needs CUDA devices.

SGLANG_PYTHON=/path/to/sglang/bin/python pytest -m gpu adapters/asyncflow-sglang
"""

import numpy as np
import pytest
import torch
from sglang_helpers import (
    make_options,
    make_requests,
    plain_logprobs,
    server_python,
    switch,
    versioned_model,
)

from asyncflow_core.parts import PartContext
from asyncflow_core.services.rollout import SwitchMode
from asyncflow_core.testing.aio import collect
from asyncflow_sglang.service import SGLangRollout

pytestmark = [pytest.mark.gpu, pytest.mark.multiproc]

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
CLOSE = 0.05
"""Mean difference of a log-prob between CUDA's kernels and a float32 forward on the CPU."""


def make_cuda_rollout(model, *, engine_args=None, **options):
    args = {"mem_fraction_static": 0.3, **(engine_args or {})}
    chosen = {"python": server_python(), "device": "cuda", "verify": "logprobs", **options}
    return SGLangRollout(
        make_options(model, engine_args=args, **chosen), PartContext(name="rollout")
    )


def assert_close(model, completion):
    expected = plain_logprobs(model, (3, 1, 2, 7), completion.response_ids)
    assert np.abs(completion.behaviour_logprobs - expected).mean() < CLOSE


async def check_updates(service, model):
    for version, mode in enumerate([None, *SwitchMode]):
        if version:
            await switch(service, model, version, mode)
        for completion in await collect(service.generate(make_requests(6))):
            assert completion.versions.tolist() == [[version, 8]]
            assert_close(versioned_model(model, version), completion)


@pytest.mark.parametrize("update", ["disk", "tensor"])
async def test_logprobs_before_and_after_updates_on_one_device(model, update):
    async with make_cuda_rollout(model, update=update) as service:
        await check_updates(service, model)


@pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")
async def test_logprobs_before_and_after_updates_over_two_ranks(model):
    async with make_cuda_rollout(model, engine_args={"tp_size": 2}) as service:
        await check_updates(service, model)


@pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")
async def test_weights_by_nccl(model):
    """The broadcast comes from device 0, the server is on device 1."""
    options = {"update": "distributed", "backend": "nccl", "engine_args": {"base_gpu_id": 1}}
    async with make_cuda_rollout(model, **options) as service:
        await check_updates(service, model)


async def test_equal_seeds_repeat_with_deterministic_inference(model):
    engine_args = {"enable_deterministic_inference": True, "attention_backend": "triton"}
    async with make_cuda_rollout(model, engine_args=engine_args) as service:
        together = {c.key: c for c in await collect(service.generate(make_requests(9)))}
        for request in make_requests(9)[::4]:
            (alone,) = await collect(service.generate([request]))
            assert alone.response_ids.tolist() == together[request.key].response_ids.tolist()
