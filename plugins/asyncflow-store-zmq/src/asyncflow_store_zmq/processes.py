"""Starting and ending the processes of a store."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
from pathlib import Path

from asyncflow_core.errors import PeerLostError, error_from_code
from asyncflow_store_zmq.files import StoreDirectory
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.spec import StoreSpec

__all__ = ["StoreProcesses"]

_STOP_S = 2.0


class StoreProcesses:
    """A controller and its shards as children; they end with this process, however it ends.

    Attributes:
        spec: what they were told; its address is the real one after `open`.
    """

    def __init__(self, options: ZmqOptions, token: str, run_dir: Path | None) -> None:
        """Prepare; `open` starts. Sockets lie in `run_dir`, where there is one."""
        self._options = options
        self._token = token
        self._run_dir = run_dir
        self._directory: StoreDirectory | None = None
        self._children: list[asyncio.subprocess.Process] = []
        self.spec: StoreSpec | None = None

    async def open(self) -> StoreSpec:
        """Start the shards, then the controller.

        Raises:
            AsyncFlowError: what a process says it cannot start for: keys, a damaged journal.
            ConfigError: the directory is no use, or another store uses it.
            PeerLostError: a process ended before it answered.
        """
        options = self._options
        self._directory = directory = await asyncio.to_thread(
            StoreDirectory,
            self._run_dir,
            options.directory,
            durable=options.durability != "none",
        )
        spec = StoreSpec(
            directory=str(directory.memory),
            sockets=str(directory.sockets),
            address=options.bind or f"ipc://{directory.sockets}/store.sock",
            token=self._token,
            shards=max(options.shards, directory.shards),
            durability=options.durability,
            capacity_rows=options.capacity_rows,
            capacity_bytes=options.capacity_bytes,
            max_staleness=options.max_staleness,
            max_gap_s=options.max_gap_s,
            keys=options.keys or "",
            allow=options.allow or "",
        )
        starting = [self._start(spec, "shard", str(number)) for number in range(spec.shards)]
        addresses = tuple(await asyncio.gather(*starting))
        spec = dataclasses.replace(spec, shard_addresses=addresses)
        address = await self._start(spec, "controller")
        self.spec = dataclasses.replace(spec, address=address)
        return self.spec

    async def _start(self, spec: StoreSpec, *role: str) -> str:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "asyncflow_store_zmq.serve", *role,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self._children.append(child)
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(ConnectionError):
            child.stdin.write(spec.dump())
            await child.stdin.drain()
        line = await child.stdout.readline()
        if not line:
            status = await child.wait()
            raise PeerLostError(
                f"the {' '.join(role)} of the data store ended at its start with status {status}; "
                f"its last words are in this process's error output"
            )
        said = line.decode().strip()
        if said.startswith("["):
            await child.wait()
            raise error_from_code(*json.loads(said))
        return said

    async def add_shard(self) -> str:
        """Start one more shard, the next in number; where it answers."""
        assert self.spec is not None
        number = self.spec.shards
        address = await self._start(self.spec, "shard", str(number))
        self._children.insert(-1, self._children.pop())  # the controller stays last
        addresses = (*self.spec.shard_addresses, address)
        self.spec = dataclasses.replace(self.spec, shards=number + 1, shard_addresses=addresses)
        return address

    @property
    def pids(self) -> list[int]:
        """Of the shards, in order, and last the controller."""
        return [child.pid for child in self._children]

    async def ended(self) -> str:
        """Wait until one of them ends by itself; which, and how."""
        waiting = {asyncio.ensure_future(child.wait()): child for child in self._children}
        done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        child = waiting[done.pop()]
        name = "controller" if child is self._children[-1] else "shard"
        return f"the {name} of the data store (pid {child.pid}) ended with {child.returncode}"

    async def aclose(self) -> None:
        """End them, the controller first; remove what they leave. Idempotent."""
        for child in reversed(self._children):
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
        for child in self._children:
            try:
                async with asyncio.timeout(_STOP_S):
                    await child.wait()
            except TimeoutError:
                child.kill()
                await child.wait()
            if child.stdin is not None:
                child.stdin.close()
        self._children.clear()
        if self._directory is not None:
            self._directory.close()
            self._directory = None
