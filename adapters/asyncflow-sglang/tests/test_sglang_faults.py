"""Real servers that are killed, stop answering, or lose who started them."""

import asyncio
import signal
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from sglang_helpers import assert_exact, make_requests, make_rollout, switch, versioned_model

from asyncflow_core.errors import ServiceTimeoutError
from asyncflow_core.services.rollout import SwitchMode
from asyncflow_core.testing.aio import collect, eventually
from asyncflow_sglang.health import State

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]

PATIENT = 600.0


def slow_down(url, seconds):
    body = f'{{"forward_sleep_time": {seconds}}}'.encode()
    request = urllib.request.Request(f"{url}/slow_down", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=60).read()


async def generating(service, requests, tokens):
    task = asyncio.ensure_future(collect(service.generate(requests)))
    start = (await service.stats()).tokens_generated

    async def begun():
        return (await service.stats()).tokens_generated >= start + tokens

    await eventually(begun, timeout_s=PATIENT)
    return task


async def test_killed_server_loses_nothing_and_comes_back_with_current_weights(model):
    async with make_rollout(model, servers=2, stream_interval=1) as service:
        first, second = service._servers.values()
        for server in (first, second):
            slow_down(server.http.url, 0.02)
        requests = make_requests(40, max_new_tokens=40)
        task = await generating(service, requests, 80)
        assert len(first.requests) > 0
        (process,) = psutil.Process(first._process._process.pid).children()
        process.kill()
        completions = await task
        assert sorted(c.key for c in completions) == sorted(r.key for r in requests)
        for completion in completions:
            assert completion.versions.tolist() == [[0, 40]]
            assert_exact(versioned_model(model, 0), completion)
        # It is down: the switch does not wait for it.
        assert first.health.state is not State.READY
        await switch(service, model, 1, SwitchMode.DRAIN)
        slow_down(second.http.url, "null")
        served = first.requests.tokens
        await eventually(lambda: first.ready, timeout_s=PATIENT)
        completions = await collect(service.generate(make_requests(200)))
        assert first.requests.tokens > served
        for completion in completions:
            assert completion.versions.tolist() == [[1, 8]]
        for completion in completions[::20]:
            assert_exact(versioned_model(model, 1), completion)


def tree(server):
    """Processes of a server that the tests started, its keeper left out."""
    return psutil.Process(server.process.pid).children(recursive=True)


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
        stopped = tree(servers[0])
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


async def test_server_stuck_behind_a_living_port_is_found_by_its_silence(model, servers):
    """Only the scheduler is stopped: the port answers, no token comes."""
    server = servers[0]
    options = {"stall_s": 3.0, "wait_s": 2.0, "update_timeout_s": 5.0}
    async with make_rollout(model, addresses=(server.url,), **options) as service:
        server.slow_down(0.02)
        task = await generating(service, make_requests(2, max_new_tokens=200), 8)
        stopped = [p for p in tree(server) if "scheduler" in " ".join(p.cmdline())]
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
import asyncio, sys
sys.path[:0] = {paths!r}
from sglang_helpers import make_rollout

async def main():
    async with make_rollout({model!r}) as service:
        (server,) = service._servers.values()
        print(server._process._process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_servers_end_with_a_service_that_is_killed(model, tmp_path):
    script = tmp_path / "service.py"
    paths = [str(Path(__file__).parent)]
    script.write_text(CHILD.format(model=str(model), paths=paths), encoding="utf-8")
    service = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=asyncio.subprocess.PIPE
    )
    keeper = int(await service.stdout.readline())
    processes = psutil.Process(keeper).children(recursive=True)
    assert len(processes) >= 3  # HTTP, scheduler, detokenizer
    service.kill()
    await service.wait()
    for process in processes:
        await eventually(
            lambda found=process: not found.is_running() or found.status() == "zombie",
            timeout_s=60,
        )
