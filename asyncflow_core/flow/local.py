"""The `local` launcher: services as supervised processes of this machine.

Each child is a session of its own. Its standard input is its lifeline: when this process ends in
whatever way, the kernel closes the pipe, and the child ends its process group (`flow.serve`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from asyncflow_core.config import Section
from asyncflow_core.errors import PeerLostError, ServiceTimeoutError
from asyncflow_core.flow.launch import Launcher, ProcessSpec, RunningProcess
from asyncflow_core.services.data_store import DataStore
from asyncflow_core.wire import Client, remote

__all__ = ["LocalLauncher", "LocalOptions", "make_run_dir"]

_LAST_LINES = 12


class LocalOptions(Section):
    """Options of the local launcher."""

    start_timeout_s: float = 600.0
    """Longest time a process may take to load its model and answer."""
    stop_timeout_s: float = 2.0
    """Time a process gets to end by itself; then its process group is killed."""
    threads: int = 1
    """Threads of numeric libraries in each process (OMP_NUM_THREADS)."""


def make_run_dir() -> Path:
    """A directory of mode 0700 for sockets and shared memory; dead runs' are swept first.

    It lies in shared memory where there is some, and is named after this process, so that what a
    killed run left behind is known to be nobody's.
    """
    shm = Path("/dev/shm")  # noqa: S108 - a private 0700 folder is made inside it
    base = shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())
    for old in base.glob("asyncflow-*"):
        owner = old.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and old.owner() == _user():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"asyncflow-{os.getpid()}-", dir=base))


def _user() -> str:
    return Path(f"/proc/{os.getpid()}").owner()


class LocalLauncher(Launcher):
    """Starts `asyncflow serve` processes and ends them all when closed."""

    def __init__(self, options: LocalOptions) -> None:
        """Keep the options."""
        self._options = options
        self._run_dir: Path | None = None
        self._processes: list[LocalProcess] = []
        self._master_port = 0

    @property
    def run_dir(self) -> Path:
        """The run's private directory; after `open`."""
        if self._run_dir is None:
            raise PeerLostError("the launcher is not open")
        return self._run_dir

    async def open(self) -> None:
        """Make the run's directory."""
        self._run_dir = make_run_dir()
        with socket.socket() as probe:  # for torch.distributed's rendezvous of trainer ranks
            probe.bind(("127.0.0.1", 0))
            self._master_port = probe.getsockname()[1]

    async def start(self, spec: ProcessSpec, store: DataStore) -> RunningProcess:
        """Start one process; it reaches the store by its address."""
        process = LocalProcess(spec, self._options)
        self._processes.append(process)
        await process.start(self._environment(spec))
        return process

    async def aclose(self) -> None:
        """End all processes side by side, then remove the run's directory."""
        await asyncio.gather(*(process.stop() for process in self._processes))
        self._processes.clear()
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)
            self._run_dir = None

    def _environment(self, spec: ProcessSpec) -> dict[str, str]:
        environment = {
            **os.environ,
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
                "MASTER_PORT": str(self._master_port),
            }
        return environment | spec.env


class LocalProcess(RunningProcess):
    """One child."""

    def __init__(self, spec: ProcessSpec, options: LocalOptions) -> None:
        """Keep the spec; `start` starts."""
        self.name = spec.name
        self._spec = spec
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._client: Client | None = None
        self._exited: asyncio.Task[int] | None = None

    async def start(self, environment: dict[str, str]) -> None:
        """Spawn it and hand it its spec."""
        Path(self._spec.log_path).parent.mkdir(parents=True, exist_ok=True)
        with open(self._spec.log_path, "ab") as log:  # noqa: ASYNC230 - opened once, at start
            self._process = await asyncio.create_subprocess_exec(
                self._spec.python,
                *("-m", "asyncflow_core.cli", "serve", "--spec", "-"),
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

    async def ready(self) -> None:
        """Connect to it; raises what `ended` says if it dies first."""
        assert self._exited is not None
        client = Client(
            self._spec.address,
            name="controller",
            token=self._spec.token,
            connect_s=self._options.start_timeout_s,
        )
        opening = asyncio.create_task(client.open())
        try:
            await asyncio.wait({opening, self._exited}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                raise PeerLostError(await self.ended(), service=self.name)
            try:
                opening.result()
            except PeerLostError as error:
                raise ServiceTimeoutError(
                    f"{self.name} did not answer within {self._options.start_timeout_s:g} s of its "
                    f"start; {self._last_lines()}",
                    service=self.name,
                ) from error
        finally:
            opening.cancel()
        self._client = client

    def control(self, interface: type[Any]) -> Any:
        """What it answers, over the wire."""
        if self._client is None:
            raise PeerLostError(f"{self.name} is not connected", service=self.name)
        return remote(interface, self._client, self.name)

    async def ended(self) -> str:
        """Wait for its end; status and last log lines."""
        assert self._exited is not None
        status = await asyncio.shield(self._exited)
        how = f"ended with status {status}"
        if status < 0:
            how = f"was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"{self.name} {how}; {self._last_lines()}"

    async def stop(self) -> None:
        """End it: by signal, then by force; nothing of its process group is left."""
        if self._client is not None:
            await self._client.aclose()
        if self._process is None or self._exited is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        await asyncio.wait({self._exited}, timeout=self._options.stop_timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._exited
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _last_lines(self) -> str:
        try:
            with open(self._spec.log_path, encoding="utf-8", errors="replace") as log:
                lines = deque(log, maxlen=_LAST_LINES)
        except OSError as error:
            return f"its log cannot be read: {error}"
        text = "".join(f"    {line.rstrip()}\n" for line in lines)
        return f"last lines of {self._spec.log_path}:\n{text}" if text else "its log is empty"
