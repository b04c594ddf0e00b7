from __future__ import annotations

import asyncio
import logging
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from asyncflow_core.errors import (
    ConfigError,
    DataError,
    EngineError,
    LeaseLostError,
    PeerLostError,
    ProtocolError,
    ServiceClosedError,
    ServiceError,
    ServiceTimeoutError,
    WireDecodeError,
    WireVersionError,
)
from asyncflow_core.testing.aio import eventually
from asyncflow_core.wire import Client, Method, Server, _protocol

TOKEN = "token-of-this-run"
Bench = Any


async def test_many_calls_in_flight_are_answered_each_with_its_own(client: Client) -> None:
    answers = await asyncio.gather(
        *[client.call("bench.echo", {"value": i}, returns=int) for i in range(300)]
    )
    assert answers == list(range(300))


async def test_slow_call_does_not_hold_up_others(client: Client, bench: Bench) -> None:
    slow = asyncio.create_task(client.call("bench.wait", {}))
    await asyncio.wait_for(bench.started.wait(), 10)
    assert await client.call("bench.echo", {"value": 1}) == 1
    bench.gate.set()
    assert await slow == "done"


async def test_large_arrays_go_both_ways(client: Client) -> None:
    array = np.arange(1_000_000, dtype=np.float32)
    back = await client.call("bench.echo", {"value": [array, b"x"]})
    np.testing.assert_array_equal(back[0], array)
    assert back[1] == b"x"


async def test_handlers_error_crosses_by_code_and_names_the_service(client: Client) -> None:
    with pytest.raises(LeaseLostError, match=r"^bench\.fail: mine$") as caught:
        await client.call("bench.fail", {"error": "lookup"})
    assert caught.value.service == "bench-0"


async def test_foreign_error_becomes_an_engine_error_with_a_traceback_in_the_servers_log(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(EngineError, match="KeyError: 'who'"):
        await client.call("bench.fail", {"error": "key"})
    assert "KeyError" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("bench.nothing", r"no method 'bench.nothing' \(there are: \['bench.count'"),
        ("bench.count", "it yields items"),
    ],
)
async def test_wrong_method_is_refused_in_words(client: Client, method: str, text: str) -> None:
    with pytest.raises(ServiceError, match=text):
        await client.call(method, {})
    assert await client.call("bench.echo", {"value": 1}) == 1


async def test_result_of_another_type_is_named(client: Client) -> None:
    with pytest.raises(WireDecodeError, match=r"result of bench\.echo: got str 'a', allowed: int"):
        await client.call("bench.echo", {"value": "a"}, returns=int)


async def test_what_cannot_be_sent_fails_here_and_leaves_the_client_usable(client: Client) -> None:
    with pytest.raises(DataError, match="cannot be sent"):
        await client.call("bench.echo", {"value": object()})
    assert await client.call("bench.echo", {"value": 1}) == 1


async def test_deadline_ends_the_call_here_and_the_handler_there(
    client: Client, bench: Bench
) -> None:
    with pytest.raises(ServiceTimeoutError, match=r"bench\.wait: no answer|no result within 0\.05"):
        await client.call("bench.wait", {}, timeout_s=0.05)
    await asyncio.wait_for(bench.ended.wait(), 10)


@pytest.mark.parametrize("timeout_s", [-5.0, -math.inf, math.nan])
async def test_deadline_that_is_none_is_refused_here_and_other_calls_go_on(
    client: Client, bench: Bench, timeout_s: float
) -> None:
    waiting = asyncio.create_task(client.call("bench.wait", {}, timeout_s=0.2))
    with pytest.raises(ConfigError, match="timeout_s"):
        await client.call("bench.echo", {"value": 1}, timeout_s=timeout_s)
    with pytest.raises(ConfigError, match="timeout_s"):
        await anext(client.stream("bench.count", {"items": 3}, timeout_s=timeout_s))
    with pytest.raises(ServiceTimeoutError):  # and not cut off with it
        await waiting
    assert await client.call("bench.echo", {"value": 1}) == 1


async def test_server_keeps_the_deadline_of_a_client_that_does_not(
    client: Client, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_expire", lambda *_: None)
    with pytest.raises(ServiceTimeoutError, match=r"bench\.wait: no result within 0\.05 s"):
        await client.call("bench.wait", {}, timeout_s=0.05)
    assert bench.ended.is_set()


async def test_cancelled_call_cancels_the_handler(client: Client, bench: Bench) -> None:
    call = asyncio.create_task(client.call("bench.wait", {}))
    await asyncio.wait_for(bench.started.wait(), 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.wait_for(bench.ended.wait(), 10)
    assert await client.call("bench.echo", {"value": 1}) == 1


async def test_stream_yields_everything_in_order(client: Client, bench: Bench) -> None:
    assert [i async for i in client.stream("bench.count", {"items": 100}, items=int)] == list(
        range(100)
    )
    assert bench.ended.is_set()


async def test_slow_reader_lets_the_server_run_ahead_by_the_window_only(
    client: Client, bench: Bench
) -> None:
    stream = client.stream("bench.count", {"items": 1000}, window=4)
    assert await anext(stream) == 0
    for _ in range(20):
        await client.call("bench.echo", {})
    assert bench.yielded == 4
    await stream.aclose()
    await asyncio.wait_for(bench.ended.wait(), 10)


async def test_closed_stream_closes_the_generator_while_it_waits(
    client: Client, bench: Bench
) -> None:
    stream = client.stream("bench.stuck", {})
    assert await anext(stream) == 1
    await stream.aclose()
    await asyncio.wait_for(bench.ended.wait(), 10)


async def test_deadline_of_an_item_ends_the_stream_on_both_sides(
    client: Client, bench: Bench
) -> None:
    stream = client.stream("bench.stuck", {}, timeout_s=0.1)
    assert await anext(stream) == 1
    with pytest.raises(ServiceTimeoutError):
        await anext(stream)
    await asyncio.wait_for(bench.ended.wait(), 10)


async def test_error_inside_a_stream_comes_after_its_items(
    server: Server, client: Client, bench: Bench
) -> None:
    stream = client.stream("bench.count", {"items": "three"})
    with pytest.raises(EngineError, match=r"bench\.count: TypeError"):
        await anext(stream)


async def test_client_of_another_run_is_refused_in_words(server: Server) -> None:
    stray = Client(server.address, name="stray", token="another", timeout_s=5)
    with pytest.raises(ProtocolError, match=r"'stray' has not the token of the run.*'bench-0'"):
        await stray.open()
    with pytest.raises(ProtocolError):
        await stray.call("bench.echo", {})


async def test_other_wire_version_is_refused_and_says_which_side_to_upgrade(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Client._send

    def older(self: Client, message: list[object]) -> None:
        sent(self, [message[0], 0, *message[2:]])

    monkeypatch.setattr(Client, "_send", older)
    client = Client(server.address, name="old", token=TOKEN)
    with pytest.raises(
        WireVersionError,
        match=rf"wire version 0 and the server 'bench-0' {_protocol.WIRE_VERSION}; up.*client",
    ):
        await client.open()


async def test_nobody_at_the_address_is_said_after_connect_s(run_dir: Path) -> None:
    client = Client(f"ipc://{run_dir}/none", name="c", token=TOKEN, connect_s=0.1)
    with pytest.raises(PeerLostError, match=r"no server answered at .* is the service running"):
        await client.open()


async def test_client_may_come_before_its_server(run_dir: Path, bench: Bench) -> None:
    address = f"ipc://{run_dir}/s"
    client = Client(address, name="c", token=TOKEN, connect_s=10)
    opening = asyncio.create_task(client.open())
    await asyncio.sleep(0)
    server = Server(address, name="late", token=TOKEN)
    server.expose("bench", bench.methods())
    async with server:
        await opening
        assert await client.call("bench.echo", {"value": 2}) == 2
        await client.aclose()


async def test_closed_client_says_so_and_fails_what_is_under_way(
    client: Client, bench: Bench
) -> None:
    call = asyncio.create_task(client.call("bench.wait", {}))
    await asyncio.wait_for(bench.started.wait(), 10)
    await client.aclose()
    await client.aclose()
    with pytest.raises(ServiceClosedError, match="was closed"):
        await call
    with pytest.raises(ServiceClosedError):
        await client.call("bench.echo", {})
    await asyncio.wait_for(bench.ended.wait(), 10)


async def test_call_before_open_is_a_service_closed_error(run_dir: Path) -> None:
    with pytest.raises(ServiceClosedError, match="not open"):
        await Client(f"ipc://{run_dir}/s", name="c", token=TOKEN).call("a.b", {})


async def test_closing_server_cancels_its_handlers_and_its_clients_are_told(
    server: Server, client: Client, bench: Bench
) -> None:
    call = asyncio.create_task(client.call("bench.wait", {}))
    await asyncio.wait_for(bench.started.wait(), 10)
    await server.aclose()
    assert bench.ended.is_set()
    with pytest.raises(PeerLostError, match="bench-0"):
        await call
    with pytest.raises(PeerLostError, match="bench-0"):
        await client.call("bench.echo", {})


async def test_server_restarts_at_the_same_path(run_dir: Path, bench: Bench) -> None:
    address = f"ipc://{run_dir}/s"
    for _ in range(3):
        server = Server(address, name="s", token=TOKEN)
        server.expose("bench", bench.methods())
        async with server, Client(address, name="c", token=TOKEN) as client:
            assert await client.call("bench.echo", {"value": 1}) == 1


async def test_open_and_close_leak_no_descriptor(run_dir: Path, bench: Bench) -> None:
    async def once() -> None:
        server = Server(f"ipc://{run_dir}/s", name="s", token=TOKEN)
        server.expose("bench", bench.methods())
        async with server, Client(server.address, name="c", token=TOKEN) as client:
            await client.call("bench.echo", {"value": np.zeros(100_000)})

    await once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await once()
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("tcp://0.0.0.0:*", "beyond this machine, where only encrypted"),
        ("tcp://10.0.0.1:5555", "beyond this machine"),
        ("tcp://*:5555", "beyond this machine"),
        ("tcp://example.org:5555", "beyond this machine"),
        ("udp://127.0.0.1:1", "neither ipc://"),
        ("ipc:///tmp/" + "x" * 103, "has 108 bytes, at most 107 are allowed by the kernel"),
    ],
)
async def test_address_that_is_not_allowed_is_refused_in_words(address: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        await Server(address, name="s", token=TOKEN).open()
    with pytest.raises(ConfigError, match=text):
        await Client(address, name="c", token=TOKEN).open()


async def test_socket_directory_open_to_others_is_refused(run_dir: Path) -> None:
    run_dir.chmod(0o755)  # noqa: ASYNC240
    with pytest.raises(ConfigError, match=r"mode 0755: others may enter.*chmod 700"):
        await Server(f"ipc://{run_dir}/s", name="s", token=TOKEN).open()


async def test_second_server_at_a_path_is_refused(run_dir: Path) -> None:
    async with Server(f"ipc://{run_dir}/s", name="s", token=TOKEN):
        with pytest.raises(ConfigError, match="another server listens"):
            await Server(f"ipc://{run_dir}/s", name="t", token=TOKEN).open()


async def test_names_are_exposed_once_and_before_open(server: Server, bench: Bench) -> None:
    with pytest.raises(ConfigError, match="'bench' cannot be served by 'bench-0'"):
        server.expose("bench", bench.methods())
    with pytest.raises(ConfigError, match="the server is open"):
        server.expose("late", bench.methods())


async def test_server_that_closes_takes_up_nothing_new(run_dir: Path) -> None:
    begun, gate, seen = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await gate.wait()

    server = Server(f"ipc://{run_dir}/s", name="s", token=TOKEN)
    server.expose("it", {"slow": Method(slow_to_end, lambda plain: plain)})
    await server.open()
    async with Client(server.address, name="c", token=TOKEN) as client:
        call = asyncio.ensure_future(client.call("it.slow", {}))
        await asyncio.wait_for(begun.wait(), 10)
        closing = asyncio.ensure_future(server.aclose())
        with pytest.raises(PeerLostError):
            await call
        assert server._socket is not None
        take = server._socket._on_message

        def spy(*message: Any) -> None:
            take(*message)
            seen.set()

        server._socket._on_message = spy
        opening = asyncio.ensure_future(Client(server.address, name="d", token=TOKEN).open())
        await asyncio.wait_for(seen.wait(), 10)
        gate.set()
        await asyncio.wait_for(closing, 10)
        with pytest.raises(PeerLostError):
            await opening


async def test_arguments_that_fail_in_an_unforeseen_way_are_answered(run_dir: Path) -> None:
    def arguments(plain: dict[str, Any]) -> dict[str, Any]:
        return {"value": 1 / plain["value"]}

    async def echo(value: float) -> float:
        return value

    server = Server(f"ipc://{run_dir}/s", name="s", token=TOKEN)
    server.expose("it", {"echo": Method(echo, arguments)})
    async with server, Client(server.address, name="c", token=TOKEN) as client:
        with pytest.raises(EngineError, match=r"it\.echo: ZeroDivisionError"):
            await client.call("it.echo", {"value": 0}, timeout_s=10)
        assert await client.call("it.echo", {"value": 2}) == 0.5


async def test_client_whose_queue_is_full_closes_all_the_same(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: Any, **_how: Any) -> None:
        raise zmq.Again

    call = asyncio.ensure_future(client.call("bench.wait", {}))
    await asyncio.sleep(0)
    monkeypatch.setattr(client._socket, "send", full)
    await client.aclose()
    with pytest.raises(ServiceClosedError):
        await call
    assert client._socket is not None
    assert client._socket.closed
