"""The `inline` launcher: every service in the run's own process, for debugging and quick tests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from asyncflow_core.errors import ServiceClosedError
from asyncflow_core.flow.processes.control import RankControl
from asyncflow_core.flow.processes.host import Host
from asyncflow_core.flow.processes.launch import End, Launcher, ProcessSpec, RunningProcess
from asyncflow_core.flow.processes.run_dir import RunDirectory
from asyncflow_core.registry import Registry
from asyncflow_core.services.data_store import DataStore

__all__ = ["InlineLauncher", "InlineProcess"]


class InlineLauncher(Launcher):
    """Opens hosts on the controller's own event loop; calls are plain calls."""

    def __init__(self, registry: Registry) -> None:
        """Build services from this registry."""
        self._registry = registry
        self._directory: RunDirectory | None = None
        self._processes: dict[str, InlineProcess] = {}

    @property
    def run_dir(self) -> Path:
        """A private directory; after `open`."""
        if self._directory is None:
            raise ServiceClosedError("the launcher is not open")
        return self._directory.path

    async def open(self) -> None:
        """Make the directory."""
        self._directory = await asyncio.to_thread(RunDirectory)

    async def start(self, spec: ProcessSpec, store: DataStore) -> RunningProcess:
        """Begin to open one host."""
        process = InlineProcess(spec.name, Host(spec, store, self._registry, self._rank))
        self._processes[spec.name] = process
        return process

    async def _rank(self, address: str, name: str) -> RankControl:
        await self._processes[name].ready()
        found: RankControl = self._processes[name].control(RankControl)
        return found

    async def aclose(self) -> None:
        """Close all hosts, then remove the directory."""
        for process in self._processes.values():
            await process.stop()
        self._processes.clear()
        if self._directory is not None:
            self._directory.remove()
            self._directory = None


class InlineProcess(RunningProcess):
    """One host."""

    def __init__(self, name: str, host: Host) -> None:
        """Start opening the host in the background."""
        self.name = name
        self._host = host
        self._opening = asyncio.create_task(host.open(), name=f"open {name}")

    async def ready(self) -> None:
        """Wait until it is open; raises what opening raised."""
        await asyncio.shield(self._opening)

    def control(self, interface: type[Any]) -> Any:
        """The host's own object."""
        return self._host.control

    async def beat(self) -> None:
        """At once: it is this process."""

    async def ended(self) -> End:
        """Wait for its worker to fail, and raise what it raised: there is no process to end."""
        await asyncio.shield(self._host.failed)
        return End(f"{self.name} ended", final=True)

    async def kill(self) -> None:
        """Close it; nothing is stuck that answers on this event loop."""
        await self.stop()

    async def bury(self) -> None:
        """Close it."""
        await self.stop()

    async def stop(self) -> None:
        """Close it."""
        self._opening.cancel()
        await asyncio.gather(self._opening, return_exceptions=True)
        await self._host.aclose()
