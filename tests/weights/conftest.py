"""Trainers and replicas in processes, the real protocol between them, and a table of findings."""

import asyncio
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from asyncflow_core.config import WeightSyncConfig
from asyncflow_core.flow.processes.control import RolloutControl, TrainerControl
from asyncflow_core.flow.weights.switching import Switching
from asyncflow_core.services.rollout import SwitchMode
from asyncflow_core.testing.aio import eventually
from asyncflow_core.wire import Client, remote

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from process import Faults  # noqa: E402 - found beside this file

LIMIT_S = 30.0
_found = []


@pytest.fixture
def detected(request):
    """A function that notes what was detected, and in how many seconds."""

    def note(fault, what, seconds):
        _found.append((fault, request.node.callspec.params.get("transport", ""), what, seconds))

    return note


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    if not _found:
        return
    terminalreporter.section("weights: faults, and what is detected in how long")
    for fault, transport, what, seconds in _found:
        terminalreporter.write_line(f"{fault:34} {transport:6} {seconds:7.2f} s  {what}")
    _found.clear()


class Process:
    """One started process; `control` and `faults` call into it."""

    def __init__(self, role, transport, options, run_dir, number):
        self.role, self.number = role, number
        self.address = f"ipc://{run_dir}/{role}-{number}"
        arguments = [self.address, role, transport, repr(options), str(run_dir)]
        self.child = subprocess.Popen(
            [sys.executable, str(HERE / "process.py"), *arguments], stdin=subprocess.PIPE
        )
        self.client = None

    async def connect(self):
        self.client = Client(self.address, name="test", token="t", timeout_s=600, connect_s=60)
        await self._open_unless_dead()
        interface = TrainerControl if self.role == "trainer" else RolloutControl
        self.control = remote(interface, self.client, "control")
        self.faults = remote(Faults, self.client, "faults")
        return self

    async def _open_unless_dead(self):
        """A child that ends before it answers fails the test at once, not after `connect_s`."""
        opening = asyncio.ensure_future(self.client.open())
        dead = asyncio.ensure_future(
            eventually(lambda: opening.done() or self.child.poll() is not None, timeout_s=60)
        )
        await asyncio.wait([opening, dead], return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
            pytest.fail(f"{self.role}-{self.number} ended with status {self.child.returncode}")
        dead.cancel()
        await opening

    def signal(self, number):
        self.child.send_signal(number)

    async def aclose(self):
        if self.client is not None:
            await self.client.aclose()
        self.child.send_signal(signal.SIGCONT)
        self.child.kill()
        self.child.wait()
        self.child.stdin.close()


class Cluster:
    """A trainer, its replicas, and the switching between them."""

    def __init__(self, transport, run_dir, options):
        self.transport, self.run_dir, self.options = transport, run_dir, options
        self.stack = AsyncExitStack()
        self.failure = None
        self.count = 0

    async def start(self, role):
        self.count += 1
        made = Process(role, self.transport, self.options, self.run_dir, self.count)
        self.stack.push_async_callback(made.aclose)
        return await made.connect()

    async def publish(self, version, life=0):
        async with asyncio.timeout(LIMIT_S):
            return await self.switching.publish(version, life, overlaps=self.transport == "host")

    async def serve(self, version, *names):
        """Wait until these replicas, or all, serve a version."""

        async def there():
            if self.failure is not None:
                raise self.failure
            chosen = names or self.replicas
            stats = [await self.replicas[name].control.stats() for name in chosen]
            return all(found.version == version for found in stats)

        await eventually(there, timeout_s=LIMIT_S)

    async def failed(self):
        """Wait until a replica is given up; the error that names it."""
        await eventually(lambda: self.failure is not None, timeout_s=LIMIT_S)
        return self.failure


@pytest.fixture
def cluster(tmp_path):
    """An async context manager: a trainer and `replicas` replicas."""

    @asynccontextmanager
    async def make(transport, replicas=1, options=None, **config):
        tmp_path.chmod(0o700)
        made = Cluster(transport, tmp_path, options or {})
        section = WeightSyncConfig(plugin=transport, **config)
        async with made.stack:
            roles = ["trainer", *["rollout"] * replicas]
            made.trainer, *others = await asyncio.gather(*[made.start(role) for role in roles])
            made.replicas = {f"rollout-{n}": other for n, other in enumerate(others)}
            controls = {name: other.control for name, other in made.replicas.items()}

            async def run(group_ready, end):
                async with asyncio.TaskGroup() as group:
                    made.switching = Switching(
                        controls, made.trainer.control, SwitchMode.IN_FLIGHT, group, section
                    )
                    made.switching.start()
                    group_ready.set()
                    await end.wait()
                    raise asyncio.CancelledError

            async def guarded(group_ready, end):
                try:
                    await run(group_ready, end)
                except BaseExceptionGroup as failures:
                    made.failure = failures.exceptions[0]
                except asyncio.CancelledError:
                    return

            ready, end = asyncio.Event(), asyncio.Event()
            task = asyncio.create_task(guarded(ready, end))
            await ready.wait()
            yield made
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return make


@pytest.fixture
def clock():
    """A function that starts a watch; the watch gives seconds."""

    def start():
        begun = time.perf_counter()
        return lambda: time.perf_counter() - begun

    return start
