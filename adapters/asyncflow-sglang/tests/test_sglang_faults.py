"""Real servers that are killed, stop answering, or lose who started them."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from sglang_helpers import (
    PROMPT,
    assert_exact,
    make_requests,
    make_rollout,
    plain_logprobs,
    switch,
    versioned_model,
)

from asyncflow_core.errors import ServiceTimeoutError
from asyncflow_core.services.rollout import SwitchMode
from asyncflow_core.testing.aio import collect, eventually
from asyncflow_sglang.health import State

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]

PATIENT = 600.0


async def generating(service, requests, tokens):
    task = asyncio.ensure_future(collect(service.generate(requests)))
    start = (await service.stats()).tokens_generated

    async def begun():
        return (await service.stats()).tokens_generated >= start + tokens

    await eventually(begun, timeout_s=PATIENT)
    return task


async def test_killed_server_loses_nothing_and_comes_back_with_current_weights(model, servers):
    addresses = tuple(server.url for server in servers)
    async with make_rollout(model, addresses=addresses, stream_interval=1) as service:
        first = next(iter(service._servers.values()))
        for server in servers:
            server.slow_down(0.02)
        requests = make_requests(40, max_new_tokens=40)
        task = await generating(service, requests, 80)
        assert len(first.requests) > 0
        servers[0].kill()
        completions = await task
        assert sorted(c.key for c in completions) == sorted(r.key for r in requests)
        for completion in completions:
            assert completion.versions.tolist() == [[0, 40]]
            assert_exact(versioned_model(model, 0), completion)
        # It is down: the switch does not wait for it.
        assert first.health.state is not State.READY
        await switch(service, model, 1, SwitchMode.DRAIN)
        servers[1].slow_down(None)
        served = first.requests.tokens
        servers[0].start()
        await eventually(lambda: first.ready, timeout_s=PATIENT)
        completions = await collect(service.generate(make_requests(200)))
        assert first.requests.tokens > served
        for completion in completions:
            assert completion.versions.tolist() == [[1, 8]]
        for completion in completions[::20]:
            assert_exact(versioned_model(model, 1), completion)


async def test_hung_server_gives_its_requests_back_and_returns(model, servers):
    addresses = tuple(server.url for server in servers)
    options = {"poll_timeout_s": 1.0, "stream_interval": 1, "update_timeout_s": 60.0}
    async with make_rollout(model, addresses=addresses, **options) as service:
        first = next(iter(service._servers.values()))
        for server in servers:
            server.slow_down(0.02)
        requests = make_requests(20, max_new_tokens=30)
        task = await generating(service, requests, 40)
        assert len(first.requests) > 0
        stopped = servers[0].tree
        try:
            for process in stopped:
                process.send_signal(signal.SIGSTOP)
            completions = await task
            assert sorted(c.key for c in completions) == sorted(r.key for r in requests)
            for completion in completions:
                assert_exact(versioned_model(model, 0), completion)
            assert first.health.state is State.LOST
            assert "did not answer" in first.line
            await switch(service, model, 1, SwitchMode.ABORT_RESUME)
        finally:
            for process in stopped:
                process.send_signal(signal.SIGCONT)
        await eventually(lambda: first.ready, timeout_s=PATIENT)
        for completion in await collect(service.generate(make_requests(40))):
            assert completion.versions.tolist() == [[1, 8]]
            assert_exact(versioned_model(model, 1), completion)


@pytest.mark.parametrize("update", ["disk", "distributed"])
async def test_server_that_hangs_in_an_update_holds_nobody_up(model, servers, update):
    addresses = tuple(server.url for server in servers)
    options = {"poll_timeout_s": 0.5, "update": update, "update_timeout_s": 60.0}
    async with make_rollout(model, addresses=addresses, **options) as service:
        first = next(iter(service._servers.values()))
        rename, stopped = first._engine.rename, servers[0].tree

        async def hang(label):
            """Just before it would be given the weights."""
            await rename(label)
            for process in stopped:
                process.send_signal(signal.SIGSTOP)

        first._engine.rename = hang
        try:
            await switch(service, model, 1, SwitchMode.IN_FLIGHT)
            assert first.health.state is State.LOST
            assert "did not answer" in first.line
            for completion in await collect(service.generate(make_requests(8))):
                assert completion.versions.tolist() == [[1, 8]]
        finally:
            first._engine.rename = rename
            for process in stopped:
                process.send_signal(signal.SIGCONT)
        await eventually(lambda: first.ready, timeout_s=PATIENT)
        for completion in await collect(service.generate(make_requests(40))):
            assert completion.versions.tolist() == [[1, 8]]
            assert_exact(versioned_model(model, 1), completion)


async def test_server_stuck_behind_a_living_port_is_found_by_its_silence(model, servers):
    """Only the scheduler is stopped: the port answers, no token comes."""
    server = servers[0]
    options = {"stall_s": 3.0, "wait_s": 2.0, "update_timeout_s": 5.0}
    async with make_rollout(model, addresses=(server.url,), **options) as service:
        server.slow_down(0.02)
        task = await generating(service, make_requests(2, max_new_tokens=200), 8)
        stopped = [p for p in server.tree if "scheduler" in " ".join(p.cmdline())]
        assert stopped
        try:
            for process in stopped:
                process.send_signal(signal.SIGSTOP)
            with pytest.raises(ServiceTimeoutError, match=r"wait since .* rollout/server-0"):
                await task
        finally:
            for process in stopped:
                process.send_signal(signal.SIGCONT)


CHILD = """
import asyncio, json, sys
sys.path[:0] = {paths!r}
from sglang_helpers import make_requests, make_rollout, switch
from asyncflow_core.services.rollout import SwitchMode
from asyncflow_core.testing.aio import collect

async def main():
    async with make_rollout({model!r}, stream_interval=1) as service:
        (server,) = service._servers.values()
        await switch(service, {model!r}, 1, SwitchMode.DRAIN)
        requests = make_requests(4, max_new_tokens=200)
        task = asyncio.ensure_future(collect(service.generate(requests)))
        while (await service.stats()).tokens_generated < 8:
            await asyncio.sleep(0.01)
        print(server._process._process.pid, flush=True)
        found = [[c.response_ids.tolist(), c.behaviour_logprobs.tolist()] for c in await task]
        print(json.dumps([server._process._process.pid, found]), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def server_of(keeper):
    processes = psutil.Process(keeper).children(recursive=True)
    assert len(processes) >= 3  # HTTP, scheduler, detokenizer
    return processes


async def test_own_server_is_started_again_and_ends_with_a_service_that_is_killed(model, tmp_path):
    script = tmp_path / "service.py"
    paths = [str(Path(__file__).parent)]
    script.write_text(CHILD.format(model=str(model), paths=paths), encoding="utf-8")
    service = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE, limit=1 << 20
    )
    try:
        for process in server_of(int(await service.stdout.readline())):
            process.kill()
        keeper, found = json.loads(await service.stdout.readline())
        reference = versioned_model(model, 1)  # it came back with the current weights
        for ids, logprobs in found:
            assert len(ids) == 200
            np.testing.assert_allclose(logprobs, plain_logprobs(reference, PROMPT, ids), atol=1e-5)
        processes = server_of(keeper)
    finally:
        service.kill()
        await service.wait()
    for process in processes:
        await eventually(
            lambda found=process: not found.is_running() or found.status() == "zombie",
            timeout_s=60,
        )
