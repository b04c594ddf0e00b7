"""The `local` launcher: services as supervised processes of this machine.

Nothing outlives the run. Closing the launcher ends each child, by signal, then by force. When this
process itself is killed, the guard (`processes.guard`) ends all children, also stopped ones, and
removes the run's directory. Should the guard be killed as well, each child ends its own process
group when its standard input ends (`processes.serve`), and the next run's start sweeps the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import Field

from asyncflow_core.config import Section
from asyncflow_core.errors import PeerLostError, ServiceClosedError, ServiceTimeoutError
from asyncflow_core.flow.processes import guard
from asyncflow_core.flow.processes.launch import (
    SUPERVISED,
    End,
    Launcher,
    Life,
    ProcessSpec,
    RunningProcess,
)
from asyncflow_core.flow.processes.run_dir import RunDirectory
from asyncflow_core.services.data_store import DataStore
from asyncflow_core.wire import Client, remote

__all__ = ["FINAL_STATUS", "LocalLauncher", "LocalOptions", "LocalProcess"]

_LAST_LINES = 12
_DEATH_GRACE_S = 1.0

FINAL_STATUS = 70
"""Exit status of a process that would fail in the same way again (EX_SOFTWARE)."""


class LocalOptions(Section):
    """Options of the local launcher."""

    start_timeout_s: float = Field(600.0, gt=0.0)
    """Longest time a process may take to load its model and answer."""
    stop_timeout_s: float = Field(2.0, ge=0.0)
    """Time a process gets to end by itself; then its process group is killed."""
    threads: int = Field(1, ge=1)
    """Threads of numeric libraries in each process (OMP_NUM_THREADS)."""


class LocalLauncher(Launcher):
    """Starts `asyncflow serve` processes and ends them all when closed."""

    def __init__(self, options: LocalOptions) -> None:
        """Keep the options."""
        self._options = options
        self._directory: RunDirectory | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._processes: list[LocalProcess] = []
        self._ports: dict[str, int] = {}

    @property
    def run_dir(self) -> Path:
        """The run's private directory; after `open`."""
        if self._directory is None:
            raise ServiceClosedError("the launcher is not open")
        return self._directory.path

    async def open(self) -> None:
        """Make the run's directory, start its guard."""
        self._directory = await asyncio.to_thread(RunDirectory)
        self._guard = subprocess.Popen(  # noqa: ASYNC220, S603 - takes milliseconds, our own file
            [sys.executable, "-I", "-S", guard.__file__, str(self.run_dir)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    async def start(self, spec: ProcessSpec, store: DataStore) -> RunningProcess:
        """Start one process; it reaches the store by its address."""
        process = LocalProcess(spec, self._options, self._forget)
        self._processes.append(process)
        self._tell_guard(await process.start(self._environment(spec)))
        return process

    def _forget(self, process: LocalProcess, group: int) -> None:
        """It is gone, and so is its group."""
        self._processes.remove(process)
        self._tell_guard(-group)

    def _tell_guard(self, group: int) -> None:
        assert self._guard is not None
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the guard was killed: lifelines remain
            os.write(self._guard.stdin.fileno(), b"%d\n" % group)

    async def aclose(self) -> None:
        """End all processes side by side, then remove the run's directory. Idempotent."""
        await asyncio.gather(*(process.stop() for process in self._processes))
        self._processes.clear()
        if self._directory is not None:
            # What an engine started in a session of its own.
            await asyncio.to_thread(guard.end_marked, str(self.run_dir))
            self._directory.remove()
            self._directory = None
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard.stdin.close()
            self._guard = None

    def _environment(self, spec: ProcessSpec) -> dict[str, str]:
        environment = {
            **os.environ,
            guard.MARK: str(self.run_dir),
            guard.SERVICE: f"{self.run_dir}/{spec.name}",
            "OMP_NUM_THREADS": str(self._options.threads),
            "PYTHONUNBUFFERED": "1",
            # Functions by module:name are looked up where the command was started.
            "PYTHONPATH": os.pathsep.join(
                part for part in (os.getcwd(), os.environ.get("PYTHONPATH", "")) if part
            ),
        }
        if spec.kind == "trainer":
            environment |= {
                "RANK": str(spec.rank),
                "LOCAL_RANK": str(spec.rank),
                "WORLD_SIZE": str(spec.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._port_of(spec.group)),
            }
        return environment | spec.env

    def _port_of(self, group: str) -> int:
        """Where the ranks of a group meet by torch.distributed: free when first asked for."""
        if group not in self._ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._ports[group] = probe.getsockname()[1]
        return self._ports[group]


class LocalProcess(RunningProcess):
    """One child."""

    def __init__(
        self,
        spec: ProcessSpec,
        options: LocalOptions,
        on_buried: Callable[[LocalProcess, int], None],
    ) -> None:
        """Keep the spec; `start` starts. `on_buried` is told when it and its group are gone."""
        self.name = spec.name
        self._on_buried = on_buried
        self._spec = spec
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._client: Client | None = None
        self._life: Life | None = None
        self._exited: asyncio.Task[int] | None = None

    async def start(self, environment: dict[str, str]) -> int:
        """Spawn it and hand it its spec; returns its process group."""
        Path(self._spec.log_path).parent.mkdir(parents=True, exist_ok=True)
        with open(self._spec.log_path, "ab") as log:  # noqa: ASYNC230 - opened once, at start
            self._process = await asyncio.create_subprocess_exec(
                self._spec.python,
                *("-m", "asyncflow_core.cli", "serve", "--spec", self.name),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )
        self._exited = asyncio.create_task(self._process.wait())
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died at once: `ended` tells
            self._process.stdin.write(self._spec.model_dump_json().encode() + b"\n")
            await self._process.stdin.drain()
        return self._process.pid

    async def ready(self) -> None:
        """Connect to it; raises what `ended` says if it dies first."""
        assert self._exited is not None
        client = Client(
            self._spec.address,
            name="controller",
            token=self._spec.token,
            connect_s=self._options.start_timeout_s,
            heartbeat=SUPERVISED,
        )
        opening = asyncio.create_task(client.open())
        try:
            await asyncio.wait({opening, self._exited}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                raise PeerLostError((await self.ended()).words, service=self.name)
            try:
                opening.result()
            except PeerLostError as error:
                # A connection that began and broke is seen before the end of the process.
                if (await asyncio.wait({self._exited}, timeout=_DEATH_GRACE_S))[0]:
                    raise PeerLostError((await self.ended()).words, service=self.name) from error
                raise ServiceTimeoutError(
                    f"{self.name} did not answer within {self._options.start_timeout_s:g} s of its "
                    f"start (launcher.options.start_timeout_s); {self._last_lines()}",
                    service=self.name,
                ) from error
        finally:
            opening.cancel()
        self._client = client
        self._life = remote(Life, client, "life", timeout_s=None)

    def control(self, interface: type[Any]) -> Any:
        """What it answers, over the wire."""
        if self._client is None:
            raise PeerLostError(f"{self.name} is not connected", service=self.name)
        # A step takes as long as it takes; the end of the process ends every call.
        return remote(interface, self._client, self.name, timeout_s=None)

    async def beat(self) -> None:
        """Wait for its event loop to answer."""
        if self._life is None:
            raise PeerLostError(f"{self.name} is not connected", service=self.name)
        await self._life.beat()

    async def ended(self) -> End:
        """Wait for its end; status and last log lines."""
        assert self._exited is not None
        status = await asyncio.shield(self._exited)
        how = f"ended with status {status}"
        if status < 0:
            how = f"was killed by signal {-status} ({signal.Signals(-status).name})"
        return End(f"{self.name} {how}; {self._last_lines()}", final=status == FINAL_STATUS)

    async def kill(self) -> None:
        """SIGKILL, to its whole process group; also one that is stopped ends by it."""
        if self._process is not None:
            guard.end_group(self._process.pid)

    async def stop(self) -> None:
        """End it: by signal, then by force; nothing of its process group is left."""
        if self._client is not None:
            await self._client.aclose()
        if self._process is None or self._exited is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        await asyncio.wait({self._exited}, timeout=self._options.stop_timeout_s)
        guard.end_group(self._process.pid)
        await self._exited
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def bury(self) -> None:
        """Also end what it started in sessions of their own: an engine may hold a device."""
        if self._process is None:
            return
        await self.stop()
        group, self._process = self._process.pid, None
        self._on_buried(self, group)
        mark = f"{self._spec.run_dir}/{self.name}"
        await asyncio.to_thread(guard.end_marked, mark, guard.SERVICE)

    def _last_lines(self) -> str:
        try:
            with open(self._spec.log_path, encoding="utf-8", errors="replace") as log:
                lines = deque(log, maxlen=_LAST_LINES)
        except OSError as error:
            return f"its log cannot be read: {error}"
        text = "\n".join(f"    {line.rstrip()}" for line in lines)
        return f"last lines of {self._spec.log_path}:\n{text}" if text else "its log is empty"
