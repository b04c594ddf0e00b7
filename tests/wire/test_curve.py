"""Encrypted connections between real processes: the right key gets in, everybody else is told."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from asyncflow_core.errors import ConfigError, PeerLostError, ServiceError
from asyncflow_core.testing.aio import eventually
from asyncflow_core.wire import BlockingClient, Client, KeyPair, Server, split_key, with_key
from tests.wire.conftest import TOKEN, Bench

pytestmark = pytest.mark.multiproc

SERVER = """
import asyncio, sys
from asyncflow_core.wire import KeyPair, Method, Server, load_allowed
async def main():
    address, token, keys, allow = sys.argv[1:]
    server = Server(address, name="far", token=token, keys=KeyPair.load(keys),
                    allow=load_allowed(allow))
    server.expose("s", {"double": Method(lambda x: 2 * x, lambda a: a, inline=True)})
    async with server:
        print(server.address, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def beyond() -> str:
    """An address of this machine that others could reach too; the loopback where there is none."""
    found = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False)
    return next((ip for ip in found.stdout.split() if "." in ip), "127.0.0.1")


@pytest.fixture
def pair() -> KeyPair:
    return KeyPair.new()


@pytest.fixture(params=["beyond", "loopback"])
async def far(request: pytest.FixtureRequest, tmp_path: Path, pair: KeyPair) -> AsyncIterator[str]:
    """Address of a server in another process that lets `pair` in, and itself."""
    KeyPair.new().save(tmp_path / "server.key")
    (tmp_path / "allow").write_text(f"{pair.public.hex()} the test\n")
    host = beyond() if request.param == "beyond" else "127.0.0.1"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, f"tcp://{host}:*", TOKEN,
        str(tmp_path / "server.key"), str(tmp_path / "allow"), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    yield (await child.stdout.readline()).decode().strip()
    child.send_signal(signal.SIGKILL)
    await child.wait()


def client(address: str, keys: KeyPair | None, connect_s: float = 20.0) -> Client:
    return Client(address, name="near", token=TOKEN, keys=keys, connect_s=connect_s)


async def refused(address: str, keys: KeyPair | None) -> str:
    """Both clients are refused by the same sentence, long before they would give up."""
    with pytest.raises(PeerLostError) as caught:
        await client(address, keys).open()

    def block() -> None:
        with pytest.raises(PeerLostError, match=r"server at") as again:
            BlockingClient(address, name="near", token=TOKEN, keys=keys, connect_s=20.0).open()
        assert str(again.value) == str(caught.value)

    await asyncio.to_thread(block)
    assert "no server answered" not in str(caught.value)
    return str(caught.value)


async def test_allowed_key_gets_in_over_both_clients(far: str, pair: KeyPair) -> None:
    async with client(far, pair) as it:
        assert await it.call("s.double", {"x": 21}) == 42

    def block() -> int:
        with BlockingClient(far, name="near", token=TOKEN, keys=pair) as it:
            found: int = it.call("s.double", {"x": 4})
            return found

    assert await asyncio.to_thread(block) == 8


async def test_holder_of_the_servers_own_pair_gets_in(far: str, tmp_path: Path) -> None:
    async with client(far, KeyPair.load(tmp_path / "server.key")) as it:
        assert await it.call("s.double", {"x": 1}) == 2


async def test_key_that_is_not_allowed_is_told_which_and_what_to_do(far: str) -> None:
    stranger = KeyPair.new()
    text = await refused(far, stranger)
    assert f"its public key {stranger.public.hex()} is not in the server's allow-list" in text
    assert "add it there" in text


async def test_server_without_the_key_of_its_address_is_not_talked_to(
    far: str, pair: KeyPair
) -> None:
    other = KeyPair.new().public
    text = await refused(with_key(split_key(far)[0], other), pair)
    assert f"did not prove to hold the key {other.hex()}" in text


async def test_client_without_keys_is_told_that_it_needs_them(far: str, pair: KeyPair) -> None:
    with pytest.raises(ConfigError, match=r"encrypted connections only.*asyncflow keys new"):
        await client(far, None).open()
    where = split_key(far)[0]
    if where.startswith("tcp://127."):
        text = await refused(where, None)
        assert "give the client keys too" in text


async def test_stranger_beyond_encryption_reaches_no_handler_and_serving_goes_on(
    far: str, pair: KeyPair
) -> None:
    where, key = split_key(far)
    assert key is not None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    strangers = []
    for number in range(8):
        sock = context.socket(zmq.DEALER)
        sock.linger = 0
        if number % 2:
            own = KeyPair.new()
            sock.curve_publickey, sock.curve_secretkey = own.public, own.secret
            sock.curve_serverkey = key
        sock.connect(where)
        for _ in range(50):
            sock.send_multipart([os.urandom(100), bytes(1000)])
        strangers.append(sock)
    async with client(far, pair) as it:
        for number in range(100):
            assert await it.call("s.double", {"x": number}) == 2 * number
    assert not any(sock.poll(0) for sock in strangers)
    for sock in strangers:
        sock.close()
    context.term()


async def test_plain_server_on_the_loopback_needs_none_and_refuses_keys_in_words(
    bench: Bench, pair: KeyPair
) -> None:
    server = Server("tcp://127.0.0.1:*", name="plain", token=TOKEN)
    server.expose("bench", bench.methods())
    async with server:
        async with Client(server.address, name="c", token=TOKEN) as it:
            assert await it.call("bench.echo", {"value": 1}) == 1
        text = await refused(with_key(server.address, KeyPair.new().public), pair)
        assert "takes no encrypted connections" in text


async def test_keys_and_allow_list_are_refused_one_without_the_other(pair: KeyPair) -> None:
    with pytest.raises(ConfigError, match="given keys and no allow-list"):
        Server("tcp://*:1", name="s", token=TOKEN, keys=pair)
    with pytest.raises(ConfigError, match="given an allow-list and no keys"):
        Server("tcp://*:1", name="s", token=TOKEN, allow=[pair.public])


async def test_refused_key_stands_in_the_servers_log(
    bench: Bench, pair: KeyPair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "asyncflow_core.wire._gate")
    server = Server("tcp://127.0.0.1:*", name="s", token=TOKEN, keys=pair, allow=[pair.public])
    server.expose("bench", bench.methods())
    stranger = KeyPair.new()
    async with server:
        with pytest.raises(PeerLostError, match="allow-list"):
            await client(server.address, stranger).open()
    assert f"the public key {stranger.public.hex()} is not in the allow-list" in caplog.text


async def test_encrypted_servers_open_and_close_leak_nothing(bench: Bench, pair: KeyPair) -> None:
    async def once() -> None:
        server = Server("tcp://127.0.0.1:*", name="s", token=TOKEN, keys=pair, allow=[pair.public])
        server.expose("bench", bench.methods())
        async with server, client(server.address, pair) as it:
            assert await it.call("bench.echo", {"value": 1}) == 1

    await once()
    before = len(os.listdir("/proc/self/fd"))
    threads = len(os.listdir("/proc/self/task"))
    for _ in range(5):
        await once()
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    await eventually(lambda: len(os.listdir("/proc/self/task")) <= threads + 5)


async def test_gone_encrypted_server_ends_calls(bench: Bench, pair: KeyPair) -> None:
    server = Server("tcp://127.0.0.1:*", name="s", token=TOKEN, keys=pair, allow=[pair.public])
    server.expose("bench", bench.methods())
    await server.open()
    async with client(server.address, pair) as it:
        call = asyncio.create_task(it.call("bench.wait", {}))
        await asyncio.wait_for(bench.started.wait(), 10)
        await server.aclose()
        with pytest.raises(ServiceError):
            await call
