"""Kept hostile sequences against a real server in another process, which goes on serving.

Each file of `corpus/` once made something fail, or covers a refusal. `fuzz_wire.py` begins with
them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from asyncflow_core.testing.aio import eventually
from asyncflow_core.wire import WIRE_VERSION, Client, Server, _protocol, decode, encode
from tests.wire import sequences
from tests.wire.conftest import TOKEN

FILES = sorted(sequences.CORPUS.glob("*.json"))

SERVER = """
import asyncio, sys
from tests.wire.conftest import Bench
from asyncflow_core.wire import Server
async def main():
    asyncio.get_running_loop().set_exception_handler(lambda _, how: print(how, file=sys.stderr))
    server = Server(sys.argv[1], name="victim", token=sys.argv[2])
    server.expose("bench", Bench().methods())
    async with server:
        print(server.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


class Bad:
    """A client that says what a file says."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)

    def say(self, *messages: sequences.Message) -> None:
        for message in messages:
            self._socket.send_multipart(message)

    def hello(self) -> None:
        hello = encode([_protocol.HELLO, WIRE_VERSION, TOKEN, "bad"])
        self.say(tuple(map(bytes, hello)))

    def kinds(self) -> list[int]:
        found = []
        while self._socket.poll(0):
            found.append(decode(self._socket.recv_multipart())[0])
        return found

    def close(self) -> None:
        self._socket.close()


@pytest.mark.multiproc
async def test_server_outlives_the_whole_corpus_and_serves_a_good_client_meanwhile(
    run_dir: Path,
) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, f"ipc://{run_dir}/s", TOKEN),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    address = (await child.stdout.readline()).decode().strip()
    async with Client(address, name="good", token=TOKEN, timeout_s=30) as good:
        for path in FILES:
            sequence = sequences.load(path)
            bad = Bad(address)
            if not sequence.stranger:
                bad.hello()
                await eventually(lambda bad=bad: bad.kinds() == [_protocol.WELCOME])
            bad.say(*sequence.messages)
            for number in range(3):
                assert await good.call("bench.echo", {"value": number}) == number, path.name
            bad.close()
    _, said = await child.communicate(b"")
    assert child.returncode == 0
    # What a handler itself makes of its arguments may be logged; nothing else may fail.
    for failure in ("a message could not be taken", "never retrieved", "'exception':"):
        assert failure not in said.decode(), said.decode()


@pytest.fixture
async def bad(server: Server) -> AsyncIterator[Bad]:
    made = Bad(server.address)
    yield made
    made.close()


CUT_OFF = (
    "malformed", "truncated", "frame", "array", "oversized", "count", "deep", "kind", "credit",
    "stream", "call-negative", "call-nan", "call-number", "hello",
)  # fmt: skip
"""Files, by how they are called, whose sender gets a goodbye. Others are answered, or ignored."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
async def test_sequence_is_refused_by_a_goodbye_and_a_stranger_learns_nothing(
    path: Path, client: Client, bad: Bad
) -> None:
    sequence = sequences.load(path)
    if not sequence.stranger:
        bad.hello()
        await eventually(lambda: bad.kinds() == [_protocol.WELCOME])
    bad.say(*sequence.messages)
    for number in range(3):
        assert await client.call("bench.echo", {"value": number}) == number
    found = bad.kinds()
    if path.stem.startswith(CUT_OFF):

        def cut_off() -> bool:
            found.extend(bad.kinds())
            return _protocol.GOODBYE in found

        await eventually(cut_off)
    assert _protocol.WELCOME not in found
    if sequence.stranger:
        assert set(found) <= {_protocol.GOODBYE}


@given(st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=4), max_size=5))
def test_sequence_as_bytes_comes_back(messages: list[list[bytes]]) -> None:
    whole = tuple(map(tuple, messages))
    assert tuple(sequences.from_bytes(sequences.to_bytes(whole))) == whole


@given(messages=st.lists(st.lists(st.binary(), min_size=1, max_size=3).map(tuple), max_size=3))
def test_sequence_as_file_comes_back(
    messages: list[sequences.Message], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "kept.json"
    messages.append((b"\x91" * 1000 + b"\x01", b"abcde" * 100))
    kept = sequences.Sequence("what it is", True, tuple(messages))
    sequences.write(path, kept)
    assert sequences.load(path) == kept
