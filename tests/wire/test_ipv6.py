"""Addresses of IPv6: the loopback is served and reached like that of IPv4."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from asyncflow_core.wire import BlockingClient, Client, KeyPair, Method, Server, is_ipv6

TOKEN = "token-of-this-run"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


def serve(address: str, **how: object) -> Server:
    server = Server(address, name="echo", token=TOKEN, **how)
    echo = Method(lambda value: value, lambda arguments: arguments, inline=True)
    server.expose("it", {"echo": echo})
    return server


def test_ipv6_is_an_address_in_brackets() -> None:
    assert is_ipv6("tcp://[::1]:80")
    assert not any(map(is_ipv6, ("tcp://127.0.0.1:80", "tcp://h:80", "ipc://[x]")))


@pytest.mark.parametrize("port", ["*", "0"])
async def test_server_on_the_ipv6_loopback_answers_both_clients(port: str) -> None:
    def call(address: str) -> int:
        with BlockingClient(address, name="b", token=TOKEN, connect_s=5.0) as client:
            return client.call("it.echo", {"value": 1}, returns=int)

    async with serve(f"tcp://[::1]:{port}") as server:
        assert server.address.startswith("tcp://[::1]:")
        assert int(server.address.rpartition(":")[2]) > 0
        async with Client(server.address, name="c", token=TOKEN) as client:
            assert await client.call("it.echo", {"value": 2}, returns=int) == 2
        assert await asyncio.to_thread(call, server.address) == 1


async def test_server_on_ipv6_with_keys_lets_in_who_is_allowed(tmp_path: Path) -> None:
    own, other = KeyPair.new(), KeyPair.new()
    async with serve("tcp://[::1]:*", keys=own, allow=[other.public]) as server:
        where, _, key = server.address.partition("#")
        assert (where.startswith("tcp://[::1]:"), bytes.fromhex(key)) == (True, own.public)
        async with Client(server.address, name="c", token=TOKEN, keys=other) as client:
            assert await client.call("it.echo", {"value": 3}, returns=int) == 3
