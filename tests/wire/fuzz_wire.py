"""Coverage-guided fuzzing of the wire for hours: `make fuzz`.

Each input is a sequence of messages from one client to a real server, which offers plain handlers
and a data store. Whatever it is, no error may come out of the server, no task may be left behind,
and a good client is answered. The frames of each message are decoded as values of several types,
too. A failing input lies in the current folder as `crash-*`; turn it into a file of the corpus with

    python -m tests.wire.fuzz_wire --keep crash-... NAME "what it is"
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import zmq

if __name__ == "__main__" and "--keep" not in sys.argv:
    import atheris

    with atheris.instrument_imports(include=["asyncflow_core"]):
        import asyncflow_core.wire.server  # noqa: F401

from asyncflow_core.batch import Batch, Key
from asyncflow_core.errors import WireDecodeError
from asyncflow_core.reference.data_store import InProcessDataStore
from asyncflow_core.services.data_store import DataStore, Lease, StoreStats
from asyncflow_core.services.rollout import GenerateRequest
from asyncflow_core.testing.aio import eventually
from asyncflow_core.wire import Client, Method, Server, _protocol, decode, encode, serve_service
from tests.wire import sequences

TOKEN = "token-of-this-run"
TYPES = (Any, Batch, Lease, StoreStats, GenerateRequest, Key, dict[str, Batch])
HELLO = encode([_protocol.HELLO, _protocol.WIRE_VERSION, TOKEN, "raw"])[0]
_IDENTITY = b"raw"


class Target:
    """A server, a good client, and the socket of a bad one."""

    def __init__(self, folder: Path) -> None:
        self._server = Server(f"ipc://{folder}/s", name="fuzzed", token=TOKEN)
        self._server.expose("plain", {
            "echo": Method(lambda value=None: value, lambda arguments: arguments, inline=True),
            "count": Method(count, lambda arguments: arguments, streams=True),
        })  # fmt: skip
        self._store = InProcessDataStore(capacity_rows=64)
        self._bad: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._bad.setsockopt(zmq.ROUTING_ID, _IDENTITY)
        self._bad.linger = 0
        self._failures: list[dict[str, Any]] = []
        self._runs = 0

    async def open(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, how: self._failures.append(how))
        await self._store.open()
        serve_service(self._server, "store", self._store, DataStore)
        await self._server.open()
        self._good = Client(self._server.address, name="good", token=TOKEN)
        await self._good.open()
        self._bad.connect(self._server.address)
        self._bad.send(HELLO)
        await eventually(lambda: self._bad.poll(0))

    async def close(self) -> None:
        await self._good.aclose()
        await self._server.aclose()
        await self._store.aclose()
        self._bad.close()

    async def run(self, data: bytes) -> None:
        """One input; what it raises is a finding."""
        stranger = bool(data[:1] and data[0] & 1)
        if not stranger:
            self._server._on_message(_IDENTITY, HELLO, [])
        for header, *frames in sequences.from_bytes(data[1:]):
            self._server._on_message(_IDENTITY, header, list(frames))
            kind = TYPES[len(header) % len(TYPES)]
            with contextlib.suppress(WireDecodeError):
                decode([header, *frames], kind)
        for _ in range(3):
            await asyncio.sleep(0)
        peer = self._server._peers.get(_IDENTITY)
        if peer is not None:
            self._server._end(peer, None)
        while self._server._tasks:
            await asyncio.wait(self._server._tasks, timeout=10)
        self._runs += 1
        if self._runs % 8 == 0:
            assert await self._good.call("plain.echo", {"value": 7}, timeout_s=10) == 7
        while self._bad.poll(0):
            self._bad.recv_multipart()
        if self._failures:
            raise RuntimeError(f"outside any call: {self._failures}")


async def count(items: int = 1) -> Any:
    for item in range(items):
        yield item
        await asyncio.sleep(0)


def seeds(folder: Path) -> None:
    """The corpus as a fuzzer takes it."""
    for path in sequences.CORPUS.glob("*.json"):
        found = sequences.load(path)
        start = bytes([found.stranger])
        (folder / path.stem).write_bytes(start + sequences.to_bytes(found.messages))


def keep(crash: str, name: str, about: str) -> None:
    """A finding as a file of the corpus."""
    data = Path(crash).read_bytes()
    messages = tuple(sequences.from_bytes(data[1:]))
    found = sequences.Sequence(about, bool(data[:1] and data[0] & 1), messages)
    sequences.write(sequences.CORPUS / f"{name}.json", found)


def main() -> None:
    if "--keep" in sys.argv:
        keep(*sys.argv[2:5])
        return
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Not pytest's folder: a socket's path may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="af-") as name:
        folder = Path(name)
        (folder / "seeds").mkdir()
        seeds(folder / "seeds")
        loop = asyncio.new_event_loop()
        target = Target(folder)
        loop.run_until_complete(target.open())
        atheris.Setup(
            [*sys.argv, str(folder / "seeds")],
            lambda data: loop.run_until_complete(target.run(data)),
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
