"""The processes of one run: started, connected to, watched."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from asyncflow_core.config import PartConfig
from asyncflow_core.errors import PeerLostError
from asyncflow_core.flow.host import CONTROLS
from asyncflow_core.flow.launch import Launcher, RunningProcess
from asyncflow_core.flow.plan import Plan
from asyncflow_core.flow.specs import process_specs
from asyncflow_core.flow.waits import Waits
from asyncflow_core.services.data_store import DataStore, SupportsAttach
from asyncflow_core.wire import Server, serve_service

__all__ = ["EndedError", "Processes"]

_DEATH_GRACE_S = 1.0
"""A broken connection may be seen before the end of its process, which is awaited so long."""


class EndedError(PeerLostError):
    """A process of the run ended by itself."""


class Processes:
    """Starts what a plan needs; the end of any of them ends the run.

    Attributes:
        controls: process name to what it answers, in the order of the plan.
    """

    def __init__(self, plan: Plan, log_dir: Path) -> None:
        """Keep the plan; `start` starts."""
        self._plan = plan
        self._log_dir = log_dir
        self._running: list[RunningProcess] = []
        self.controls: dict[str, Any] = {}

    async def start(
        self,
        group: asyncio.TaskGroup,
        stack: AsyncExitStack,
        launcher: Launcher,
        store: DataStore,
        waits: Waits,
    ) -> None:
        """Start all and wait until each answers; from here on each one's end ends the run."""
        token = secrets.token_hex(16)
        address, part = "", None
        if isinstance(store, SupportsAttach):
            plugin = self._plan.config.data_store.plugin
            part = PartConfig(plugin=plugin, options=store.attach_options())
        else:
            server = Server(f"ipc://{launcher.run_dir}/store.sock", name="controller", token=token)
            serve_service(server, "store", store, DataStore)
            await stack.enter_async_context(server)
            address = server.address
        # Processes end before the store they work on; closing a launcher twice is harmless.
        stack.push_async_callback(launcher.aclose)
        roles = {}
        for spec in process_specs(
            self._plan,
            run_dir=launcher.run_dir,
            store=address,
            store_part=part,
            token=token,
            log_dir=self._log_dir,
        ):
            process = await launcher.start(spec, store)
            self._running.append(process)
            roles[process.name] = spec.role.role
            group.create_task(_raise_its_end(process))
        loading = list(roles)
        waits.begin("the start", lambda: [f"{', '.join(loading)} do not answer yet"])

        async def ready(process: RunningProcess) -> None:
            await process.ready()
            self.controls[process.name] = process.control(CONTROLS[roles[process.name]])
            loading.remove(process.name)

        async with asyncio.TaskGroup() as starting:
            for process in self._running:
                starting.create_task(ready(process))

    async def one_that_ended(self) -> EndedError | None:
        """The end of a process, from which broken calls may have followed."""
        watching = [asyncio.create_task(_raise_its_end(p)) for p in self._running]
        if watching:
            await asyncio.wait(
                watching, timeout=_DEATH_GRACE_S, return_when=asyncio.FIRST_COMPLETED
            )
        for task in watching:
            task.cancel()
        results = await asyncio.gather(*watching, return_exceptions=True)
        return next((found for found in results if isinstance(found, EndedError)), None)


async def _raise_its_end(process: RunningProcess) -> None:
    raise EndedError(await process.ended(), service=process.name)
