"""Lanes keep order, carry errors, and end."""

import threading

import pytest
import torch

from asyncflow_core.errors import EngineError, ServiceClosedError
from asyncflow_hzp.lanes import Lane

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["threaded", "inline"])
def lane(request):
    lane = Lane("gather", device=CPU, threaded=request.param)
    yield lane
    lane.close()
    assert not [t for t in threading.enumerate() if t.name == "hzp-gather"]


def test_jobs_run_in_the_order_of_submission(lane):
    seen = []
    jobs = [lane.submit(f"unit {n}", lambda n=n: seen.append(n)) for n in range(50)]
    jobs[-1].wait()
    assert seen == list(range(50))


def test_error_is_raised_at_the_wait_and_fails_what_follows(lane):
    def fails():
        raise OSError("cut")

    first = lane.submit("unit 'a'", lambda: None)
    second = lane.submit("unit 'b'", fails)
    third = lane.submit("unit 'c'", lambda: None)
    first.wait()
    for job in (second, third):
        with pytest.raises(EngineError, match="gather of unit 'b' failed: cut"):
            job.wait()


def test_close_finishes_what_is_queued_and_refuses_more(lane):
    seen = []
    for number in range(5):
        lane.submit("unit", lambda number=number: seen.append(number))
    lane.close()
    assert seen == list(range(5))
    lane.close()
    with pytest.raises(ServiceClosedError):
        lane.submit("unit", lambda: None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("number", range(max(torch.cuda.device_count(), 1)))
def test_cuda_waiter_sees_what_the_lane_wrote(number):
    device = torch.device("cuda", number)  # the waiter's current device stays the first
    lane = Lane("gather", device=device, threaded=True)
    source = torch.arange(1 << 20, device=device)
    target = torch.empty_like(source)
    for round_ in range(20):
        source.fill_(round_)
        job = lane.submit("unit", lambda: target.copy_(source))
        job.wait()
        assert int(target.sum()) == round_ * len(source)
    lane.close()
