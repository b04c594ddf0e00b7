"""The same equality on CUDA with NCCL; needs two devices."""

import os

import pytest
import torch
from library_models import Case, expected_run, make_sharded, train, weights_of
from torch import distributed, multiprocessing

import asyncflow_hzp as hzp
from asyncflow_hzp.layout import Sizes, valid_sizes

pytestmark = [pytest.mark.gpu, pytest.mark.multiproc]

CASES = [
    Case(),
    Case(optimizer="adamw", micro_batches=3, clip=0.5, checkpoint=True),
    Case(low=True),
]


def join(rank, world, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    torch.set_default_device("cuda")
    distributed.init_process_group("nccl", rank=rank, world_size=world)
    for sizes in valid_sizes(world):
        for case in CASES:
            expected, _ = expected_run(world, case)
            model, optimizer = make_sharded(case, sizes)
            train(model, optimizer, case, range(2))
            found = weights_of(model)
            model.close()
            for name, tensor in expected.items():
                worst = float((found[name] - tensor).abs().max())
                assert worst <= (2e-3 if case.low else 1e-5), (sizes, case, name, worst)
    distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_all_tuples_train_as_plain():
    multiprocessing.spawn(join, (2, 29533), nprocs=2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_device_resumes_as_one_run(tmp_path):
    torch.set_default_device("cuda")
    try:
        straight, other = (make_sharded(CASES[1], Sizes(1, 1, 1)) for _ in range(2))
        train(*straight, CASES[1], range(1))
        record = hzp.save_state(tmp_path, *straight)
        hzp.load_state(tmp_path, *other, record)
        for run in (straight, other):
            train(*run, CASES[1], range(1, 3))
        expected, found = weights_of(straight[0]), weights_of(other[0])
        for model, _ in (straight, other):
            model.close()
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_device_trains_as_plain():
    torch.set_default_device("cuda")
    try:
        expected, _ = expected_run(1, CASES[1])
        model, optimizer = make_sharded(CASES[1], Sizes(1, 1, 1))
        train(model, optimizer, CASES[1], range(2))
        found = weights_of(model)
        model.close()
    finally:
        torch.set_default_device(None)
    for name, tensor in expected.items():
        assert float((found[name] - tensor).abs().max()) <= 1e-5, name
