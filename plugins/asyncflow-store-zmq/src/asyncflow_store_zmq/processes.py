"""Starting and ending the processes of a store."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import sys
from pathlib import Path

from asyncflow_core.errors import AsyncFlowError, PeerLostError, error_from_code
from asyncflow_store_zmq.files import StoreDirectory
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.spec import StoreSpec

__all__ = ["StoreProcesses"]

_log = logging.getLogger(__name__)
_STOP_S = 2.0
_CONTROLLER = -1


class StoreProcesses:
    """A controller and its shards as children; they end with this process, however it ends.

    One that dies is started again at its address, as often as the options say: a shard, since its
    memory is a file that outlives it, and the controller of a durable store.

    Attributes:
        spec: what they were told; its address is the real one after `open`.
    """

    def __init__(self, options: ZmqOptions, token: str, run_dir: Path | None) -> None:
        """Prepare; `open` starts. Sockets lie in `run_dir`, where there is one."""
        self._options = options
        self._token = token
        self._run_dir = run_dir
        self._directory: StoreDirectory | None = None
        self._children: dict[int, asyncio.subprocess.Process] = {}  # shards by number
        self._keepers: dict[int, asyncio.Task[None]] = {}
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
            lease_policies=options.lease_policies,
            rehearse=options.rehearse,
        )
        starting = [self._start(spec, number) for number in range(spec.shards)]
        addresses = tuple(await asyncio.gather(*starting))
        spec = dataclasses.replace(spec, shard_addresses=addresses)
        address = await self._start(spec, _CONTROLLER)
        self.spec = dataclasses.replace(spec, address=address)
        for who in self._children:
            self._keepers[who] = asyncio.create_task(self._keep(who))
        return self.spec

    @property
    def returns(self) -> bool:
        """Whether the controller is started again when it dies."""
        return self._options.durability != "none" and self._options.restarts > 0

    async def _keep(self, who: int) -> None:
        """Start a process again when it ends; the last end is only said."""
        for left in range(self._options.restarts, -1, -1):
            child = self._children[who]
            status = await child.wait()
            words = f"the {_name(who)} of the data store (pid {child.pid}) ended with {status}"
            if not left or (who == _CONTROLLER and not self.returns):
                _log.error("%s and is not started again", words)
                return
            _log.warning("%s and is started again, %d time(s) more at most", words, left - 1)
            assert self.spec is not None
            try:
                await self._start(self.spec, who)
            except PeerLostError:
                continue  # it died again at once
            except AsyncFlowError:
                _log.exception("the %s of the data store cannot be started again", _name(who))
                return

    async def _start(self, spec: StoreSpec, who: int) -> str:
        role = ["controller"] if who == _CONTROLLER else ["shard", str(who)]
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "asyncflow_store_zmq.serve", *role,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self._children[who] = child
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(ConnectionError):
            child.stdin.write(spec.dump())
            await child.stdin.drain()
        line = await child.stdout.readline()
        if not line:
            status = await child.wait()
            raise PeerLostError(
                f"the {_name(who)} of the data store ended at its start with status {status}; "
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
        address = await self._start(self.spec, number)
        self._keepers[number] = asyncio.create_task(self._keep(number))
        addresses = (*self.spec.shard_addresses, address)
        self.spec = dataclasses.replace(self.spec, shards=number + 1, shard_addresses=addresses)
        return address

    @property
    def pids(self) -> list[int]:
        """Of the shards, in order, and last the controller."""
        return [self._children[who].pid for who in sorted(self._children, key=_last)]

    async def ended(self) -> str:
        """Wait until one of them ends by itself; which, and how."""
        waiting = {
            asyncio.ensure_future(child.wait()): who for who, child in self._children.items()
        }
        done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        task = done.pop()
        who = waiting[task]
        return f"the {_name(who)} of the data store ended with {task.result()}"

    async def aclose(self) -> None:
        """End them, the controller first; remove what they leave. Idempotent."""
        for keeper in self._keepers.values():
            keeper.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers.values())
        self._keepers.clear()
        children = [self._children[who] for who in sorted(self._children)]
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
        for child in children:
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


def _name(who: int) -> str:
    return "controller" if who == _CONTROLLER else f"shard {who}"


def _last(who: int) -> tuple[bool, int]:
    """Shards first."""
    return who == _CONTROLLER, who
