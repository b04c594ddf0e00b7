"""Peers that die, stop, block, or mean harm."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from asyncflow_core.errors import BackpressureError, ConfigError, PeerLostError, WireDecodeError
from asyncflow_core.testing.aio import eventually
from asyncflow_core.wire import Client, Encoder, Heartbeat, Server, _protocol, encode

TOKEN = "token-of-this-run"
QUICK = Heartbeat(interval_s=0.1, timeout_s=0.5)
Bench = Any

SERVER = """
    import asyncio, sys, time
    from asyncflow_core.wire import Heartbeat, Method, Server

    async def wait(): await asyncio.Event().wait()
    async def block(seconds): time.sleep(seconds); return "done"
    async def items():
        yield 1
        await asyncio.Event().wait()

    async def main():
        server = Server(sys.argv[1], name="victim", token=sys.argv[2],
                        heartbeat=Heartbeat(interval_s=0.1, timeout_s=0.5))
        plain = lambda arguments: arguments
        server.expose("s", {"wait": Method(wait, plain), "block": Method(block, plain),
                            "items": Method(items, plain, streams=True)})
        async with server:
            print("up", flush=True)
            await asyncio.Event().wait()

    asyncio.run(main())
"""
CLIENT = """
    import asyncio, sys
    from asyncflow_core.wire import Client

    async def main():
        async with Client(sys.argv[1], name="victim", token=sys.argv[2]) as client:
            await client.call("bench.wait", {})

    asyncio.run(main())
"""


class Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, code: str, *arguments: str) -> Process:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                textwrap.dedent(code),
                *arguments,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        )

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def line(self) -> bytes:
        assert self._process.stdout is not None
        return await asyncio.wait_for(self._process.stdout.readline(), 30)

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@pytest.fixture
async def victim(run_dir: Path) -> AsyncIterator[tuple[Process, Client]]:
    process = await Process.start(SERVER, f"ipc://{run_dir}/v", TOKEN)
    try:
        assert await process.line() == b"up\n"
        client = Client(f"ipc://{run_dir}/v", name="w", token=TOKEN, heartbeat=QUICK)
        async with client:
            yield process, client
    finally:
        await process.end()


@pytest.mark.multiproc
async def test_killed_server_fails_calls_and_streams_at_once_by_name(
    victim: tuple[Process, Client],
) -> None:
    process, client = victim
    call = asyncio.create_task(client.call("s.wait", {}))
    stream = client.stream("s.items", {})
    assert await anext(stream) == 1
    process.signal(signal.SIGKILL)
    async with asyncio.timeout(5):
        with pytest.raises(PeerLostError, match=r"'victim'.*is gone") as caught:
            await call
        with pytest.raises(PeerLostError, match="'victim'"):
            await anext(stream)
        with pytest.raises(PeerLostError, match="'victim'"):
            await client.call("s.wait", {})
    assert caught.value.service == "victim"


@pytest.mark.multiproc
async def test_stopped_server_is_lost_after_the_heartbeats_timeout(
    victim: tuple[Process, Client],
) -> None:
    process, client = victim
    call = asyncio.create_task(client.call("s.wait", {}))
    process.signal(signal.SIGSTOP)
    async with asyncio.timeout(10):
        with pytest.raises(PeerLostError, match=r"silent for 0\.5 s"):
            await call


@pytest.mark.multiproc
async def test_server_busy_in_python_for_longer_than_the_timeout_is_not_taken_for_dead(
    victim: tuple[Process, Client],
) -> None:
    _, client = victim
    assert await client.call("s.block", {"seconds": 1.5}, timeout_s=20) == "done"


async def test_client_busy_in_python_for_longer_than_the_timeout_is_not_taken_for_dead(
    run_dir: Path,
) -> None:
    process = await Process.start(SERVER, f"ipc://{run_dir}/v", TOKEN)
    try:
        await process.line()
        async with Client(f"ipc://{run_dir}/v", name="w", token=TOKEN, heartbeat=QUICK) as client:
            time.sleep(1.5)  # noqa: ASYNC251  the point of the test
            assert await client.call("s.block", {"seconds": 0}) == "done"
    finally:
        await process.end()


@pytest.mark.multiproc
async def test_killed_clients_handlers_are_cancelled(run_dir: Path, bench: Bench) -> None:
    server = Server(f"ipc://{run_dir}/s", name="s", token=TOKEN, heartbeat=QUICK)
    server.expose("bench", bench.methods())
    async with server:
        process = await Process.start(CLIENT, server.address, TOKEN)
        try:
            await asyncio.wait_for(bench.started.wait(), 30)
            process.signal(signal.SIGKILL)
            await asyncio.wait_for(bench.ended.wait(), 10)
        finally:
            await process.end()


class Raw:
    """A client that sends what it likes."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def say(self, *message: Any) -> None:
        self.send(*(bytes(frame) for frame in encode(list(message))))

    def hello(self) -> None:
        self.say(_protocol.HELLO, _protocol.WIRE_VERSION, TOKEN, "raw")

    def answers(self) -> list[bytes]:
        found = []
        while self._socket.poll(0):
            found.append(self._socket.recv_multipart()[0])
        return found

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def raw(server: Server) -> Any:
    made = Raw(server.address)
    yield made
    made.close()


GARBAGE = [
    (b"", b""),
    (b"\xc1",),
    (b"\x91" * 5000,),
    (os.urandom(3000), os.urandom(3000)),
    tuple(bytes(f) for f in encode([99])),
    tuple(bytes(f) for f in encode([2, "id", 3])),
    tuple(bytes(f) for f in encode([2, 1, "bench.echo", -1.0, {}])),
    tuple(bytes(f) for f in encode([2, 1, "bench.echo", float("nan"), {}])),
    tuple(bytes(f) for f in encode([3, 1, "bench.count", 1.0, {"items": 1}, 10_000])),
    tuple(bytes(f) for f in encode([4, 1])),
    tuple(bytes(f) for f in encode([5, None])),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_hostile_client_is_cut_off_and_others_do_not_notice(
    client: Client, raw: Raw, garbage: tuple[bytes, ...]
) -> None:
    raw.hello()
    await eventually(lambda: len(raw.answers()) == 1)
    raw.send(*garbage)
    # Answered with a goodbye, then with nothing, until it shakes hands again.
    await eventually(lambda: any(answer[1] == _protocol.GOODBYE for answer in raw.answers()))
    raw.say(_protocol.CALL, 7, "bench.echo", 1.0, {"value": 1})
    for i in range(20):
        assert await client.call("bench.echo", {"value": i}) == i
    assert raw.answers() == []
    raw.hello()
    await eventually(lambda: any(answer[1] == _protocol.WELCOME for answer in raw.answers()))


async def test_stranger_without_a_handshake_gets_no_answer_and_costs_no_state(
    server: Server, client: Client, raw: Raw
) -> None:
    for garbage in GARBAGE:
        raw.send(*garbage)
    raw.say(_protocol.CALL, 1, "bench.echo", 1.0, {"value": 1})
    raw.say(_protocol.HELLO, _protocol.WIRE_VERSION, "x" * 5000, "raw")
    for i in range(20):
        assert await client.call("bench.echo", {"value": i}) == i
    assert raw.answers() == []
    assert len(server._peers) == 1


async def test_frame_beyond_the_limit_ends_that_connection_only(
    run_dir: Path, bench: Bench
) -> None:
    from asyncflow_core.wire import Limits

    limits = Limits(frame_bytes=100_000, header_bytes=100_000)
    server = Server(f"ipc://{run_dir}/s", name="s", token=TOKEN, limits=limits)
    server.expose("bench", bench.methods())
    async with server, Client(server.address, name="good", token=TOKEN) as good:
        bad = Client(server.address, name="bad", token=TOKEN)
        async with bad:
            with pytest.raises(PeerLostError):
                await bad.call("bench.echo", {"value": b"x" * 200_000})
        assert await good.call("bench.echo", {"value": 1}) == 1


async def test_credit_beyond_the_window_is_a_breach(client: Client, raw: Raw, bench: Bench) -> None:
    raw.hello()
    raw.say(_protocol.STREAM, 1, "bench.stuck", 1.0, {}, 8)
    raw.say(_protocol.CREDIT, 1, 2**40)
    await eventually(lambda: any(answer[1] == _protocol.GOODBYE for answer in raw.answers()))
    assert await client.call("bench.echo", {"value": 1}) == 1


async def test_more_calls_than_allowed_are_refused(
    client: Client, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_protocol, "MAX_CALLS", 3)
    calls = [asyncio.create_task(client.call("bench.wait", {})) for _ in range(3)]
    await asyncio.wait_for(bench.started.wait(), 10)
    with pytest.raises(BackpressureError, match="'worker-0' has 3 calls under way"):
        await client.call("bench.echo", {})
    bench.gate.set()
    assert await asyncio.gather(*calls) == ["done"] * 3


@pytest.mark.parametrize("answer", [b"\xc1", bytes(Encoder().encode([77])[0])])
async def test_server_that_sends_garbage_is_given_up(
    server: Server, client: Client, bench: Bench, answer: bytes
) -> None:
    call = asyncio.create_task(client.call("bench.wait", {}))
    await asyncio.wait_for(bench.started.wait(), 10)
    (identity,) = server._peers
    assert server._socket is not None
    server._socket.send([identity, answer])
    with pytest.raises(WireDecodeError):
        await call
    with pytest.raises(WireDecodeError):
        await client.call("bench.echo", {})


@pytest.mark.parametrize(
    ("interval_s", "timeout_s"),
    [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (1.0, float("inf")), (float("nan"), 1.0), (1.0, 1e7)],
)
def test_heartbeat_without_a_pause_or_an_end_is_refused(
    interval_s: float, timeout_s: float
) -> None:
    with pytest.raises(ConfigError, match=r"a heartbeat's interval_s is at least 0\.001 s"):
        Heartbeat(interval_s=interval_s, timeout_s=timeout_s)
