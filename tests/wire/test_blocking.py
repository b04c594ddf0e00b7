"""The client without an event loop: calls, errors, deadlines, the server's death."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from asyncflow_core.errors import (
    ConfigError,
    PeerLostError,
    ProtocolError,
    ServiceClosedError,
    ServiceTimeoutError,
    WireVersionError,
)
from asyncflow_core.wire import BlockingClient, Method, Server
from asyncflow_core.wire._link import Link

TOKEN = "token-of-this-run"


@pytest.fixture
async def server(run_dir):
    """Echoes, refuses, and waits."""

    def plain(arguments):
        return arguments

    async def wait(value):
        await asyncio.sleep(value)

    def refuse(value):
        raise ConfigError(f"no {value}")

    def later(value):
        async def answer():
            return value + 1

        return answer()

    server = Server(f"ipc://{run_dir}/b", name="echo", token=TOKEN)
    methods = {
        "echo": Method(lambda value: value, plain, inline=True),
        "refuse": Method(refuse, plain, inline=True),
        "later": Method(later, plain, inline=True),
        "wait": Method(wait, plain),
    }
    server.expose("it", methods)
    async with server:
        yield server


def client(server, **how):
    return BlockingClient(server.address, **{"name": "b", "token": TOKEN, "connect_s": 5.0, **how})


async def on_thread(function):
    return await asyncio.to_thread(function)


async def test_call_returns_values_and_large_arrays(server):
    def run():
        with client(server) as it:
            big = np.arange(100_000)
            np.testing.assert_array_equal(it.call("it.echo", {"value": big}), big)
            return it.call("it.later", {"value": 1})

    assert await on_thread(run) == 2


async def test_send_many_take_results_in_any_order(server):
    def run():
        with client(server) as it:
            numbers = [it.send("it.echo", {"value": i}) for i in range(20)]
            found = [it.wait(number) for number in reversed(numbers)]
            with pytest.raises(ServiceClosedError):
                it.wait(numbers[0])
            return found

    assert await on_thread(run) == list(reversed(range(20)))


async def test_call_refused_raises_the_error_of_its_code(server):
    def run():
        with client(server) as it:
            with pytest.raises(ConfigError, match="no luck"):
                it.call("it.refuse", {"value": "luck"})
            return it.call("it.echo", {"value": 3})

    assert await on_thread(run) == 3


async def test_call_past_its_deadline_is_a_timeout(server):
    def run():
        with client(server) as it, pytest.raises(ServiceTimeoutError):
            it.call("it.wait", {"value": 30.0}, timeout_s=0.05)

    await on_thread(run)


async def test_call_past_its_deadline_cancels_the_handler_and_keeps_nothing(server, monkeypatch):
    monkeypatch.setattr("asyncflow_core.wire.blocking._GRACE_S", 0.0)

    def run():
        with client(server) as it:
            for _ in range(3):
                with pytest.raises(ServiceTimeoutError):
                    it.call("it.wait", {"value": 0.2}, timeout_s=0.01)
            assert it.call("it.wait", {"value": 0.4}) is None  # late answers came meanwhile
            return it._waiting, it._results

    assert await on_thread(run) == (set(), {})


@pytest.mark.parametrize("timeout_s", [-5.0, -math.inf, math.nan])
async def test_deadline_that_is_none_is_refused_here_and_other_calls_go_on(server, timeout_s):
    def run():
        with client(server) as it:
            number = it.send("it.echo", {"value": 2})
            with pytest.raises(ConfigError, match="timeout_s"):
                it.call("it.echo", {"value": 1}, timeout_s=timeout_s)
            return it.wait(number), it.call("it.echo", {"value": 3}, timeout_s=math.inf)

    assert await on_thread(run) == (2, 3)


async def test_call_waits_as_long_as_its_own_deadline_says(server):
    def run():
        with client(server, timeout_s=0.01) as it:
            return it.call("it.wait", {"value": 1.5}, timeout_s=30.0)

    assert await on_thread(run) is None


async def test_server_gone_ends_a_call_and_all_that_follow(server):
    def begin():
        it = client(server)
        it.open()
        return it, it.send("it.wait", {"value": 30.0})

    it, number = await on_thread(begin)
    await server.aclose()

    def rest():
        with pytest.raises(PeerLostError):
            it.wait(number)
        with pytest.raises(PeerLostError):
            it.call("it.echo", {"value": 1})
        it.close()
        it.close()

    await on_thread(rest)


async def test_open_with_wrong_token_or_version_is_told_in_words(server, monkeypatch):
    def run():
        with pytest.raises(ProtocolError, match="token"):
            client(server, token="other").open()
        hello = Link.hello
        monkeypatch.setattr(Link, "hello", lambda link: [hello(link)[0], 0, *hello(link)[2:]])
        with pytest.raises(WireVersionError, match=r"version 0.*client"):
            client(server).open()

    await on_thread(run)


async def test_open_without_server_gives_up(run_dir):
    def run():
        with pytest.raises(PeerLostError, match="is the service running"):
            BlockingClient(f"ipc://{run_dir}/none", name="b", token=TOKEN, connect_s=0.1).open()

    await on_thread(run)
