from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncflow_core.errors import LeaseLostError
from asyncflow_core.wire import Client, Method, Server

TOKEN = "token-of-this-run"


class _PluginsOwnError(LeaseLostError):
    code = "mine"


class Bench:
    """Handlers that say what happens to them."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.gate = asyncio.Event()
        self.yielded = 0

    async def echo(self, value: Any = None) -> Any:
        return value

    async def wait(self) -> str:
        self.started.set()
        try:
            await self.gate.wait()
        finally:
            self.ended.set()
        return "done"

    async def fail(self, error: str) -> None:
        raise {"key": KeyError("who"), "lookup": _PluginsOwnError("mine")}[error]

    async def count(self, items: int) -> AsyncIterator[int]:
        try:
            for item in range(items):
                self.yielded = item + 1
                yield item
        finally:
            self.ended.set()

    async def stuck(self) -> AsyncIterator[int]:
        yield 1
        try:
            await self.gate.wait()
        finally:
            self.ended.set()

    def methods(self) -> dict[str, Method]:
        def plain(arguments: dict[str, Any]) -> dict[str, Any]:
            return arguments

        calls = {n: Method(getattr(self, n), plain) for n in ("echo", "wait", "fail")}
        streams = {n: Method(getattr(self, n), plain, streams=True) for n in ("count", "stuck")}
        return calls | streams


@pytest.fixture
def run_dir() -> Iterator[Path]:
    # Not tmp_path: a socket's path may have 107 bytes.
    path = Path(tempfile.mkdtemp(prefix="af-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, run_dir: Path) -> str:
    return f"ipc://{run_dir}/s" if request.param == "ipc" else "tcp://127.0.0.1:*"


@pytest.fixture
async def bench() -> Bench:
    return Bench()


@pytest.fixture
async def server(address: str, bench: Bench) -> AsyncIterator[Server]:
    made = Server(address, name="bench-0", token=TOKEN)
    made.expose("bench", bench.methods())
    async with made:
        yield made
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [task for task in others if task.get_name().startswith("bench.")]


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with Client(server.address, name="worker-0", token=TOKEN, timeout_s=20) as made:
        yield made
