"""The processes of one run: started, connected to, watched, and started again when they die.

A rollout replica or a stage's worker that dies or is stuck comes back, `watchdog.restarts` times.
What it held goes to others at once. A trainer's end, and any end during start-up, ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncflow_core.config import PartConfig
from asyncflow_core.errors import PeerLostError, ServiceError
from asyncflow_core.flow.planning.plan import Plan
from asyncflow_core.flow.planning.specs import process_specs
from asyncflow_core.flow.processes.host import CONTROLS
from asyncflow_core.flow.processes.launch import (
    SUPERVISED,
    End,
    Launcher,
    ProcessSpec,
    RankRole,
    RolloutRole,
    RunningProcess,
    StageRole,
    TrainerRole,
)
from asyncflow_core.flow.processes.waits import Waits
from asyncflow_core.flow.processes.watchdog import Clock, Restarts, Watchdog
from asyncflow_core.flow.working.calls import CallLog
from asyncflow_core.services.data_store import NO_DROPS, DataStore, SupportsAttach, SupportsEviction
from asyncflow_core.wire import Server, serve_service

__all__ = ["EndedError", "Processes"]

_log = logging.getLogger(__name__)

_DEATH_GRACE_S = 1.0
"""A broken connection may be seen before the end of its process, which is awaited so long."""


class EndedError(PeerLostError):
    """A process of the run ended, and that ends the run. `trains`: it was one of the trainer's."""

    def __init__(self, message: str, *, service: str = "", trains: bool = False) -> None:
        """Keep what it was."""
        super().__init__(message, service=service)
        self.trains = trains


@dataclass(eq=False)
class _Service:
    """One process of the plan, over all its lives."""

    spec: ProcessSpec
    process: RunningProcess
    stuck: str = ""
    """Why we ended it, if we did."""
    calls: CallLog | None = None
    """Of a stage."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def returns(self) -> bool:
        """Whether it may be started again."""
        return isinstance(self.spec.role, RolloutRole | StageRole)


class Processes:
    """Starts what a plan needs, and keeps it alive.

    Attributes:
        controls: process name to what it answers, in the order of the plan.
        clock: the run's time, without stops.
        restarts: how often which process was started again.
    """

    def __init__(self, plan: Plan, log_dir: Path) -> None:
        """Keep the plan; `start` starts."""
        self._plan = plan
        self._log_dir = log_dir
        self._services: list[_Service] = []
        self._up = False
        watchdog = plan.config.watchdog
        self._stuck_s = watchdog.stuck_s
        self._watchdog = Watchdog(watchdog.stuck_s)
        self.clock = Clock()
        self.restarts = Restarts(watchdog.restarts, watchdog.restart_window_s)
        self.controls: dict[str, Any] = {}

    def keep_alive(
        self, left: Callable[[str], None], back: Callable[[str, Any], Awaitable[None]]
    ) -> None:
        """Every worker has begun: from here on one that dies is started again.

        Args:
            left: called with the name of a process that died.
            back: called with the name and the control of one that answers and works again.
        """
        self._left, self._back, self._up = left, back, True

    async def start(
        self,
        group: asyncio.TaskGroup,
        stack: AsyncExitStack,
        launcher: Launcher,
        store: DataStore,
        waits: Waits,
    ) -> None:
        """Start all and wait until each answers; one that ends ends the run."""
        self._launcher, self._store, self._waits = launcher, store, waits
        token = secrets.token_hex(16)
        address, part = "", None
        if isinstance(store, SupportsAttach):
            plugin = self._plan.config.data_store.plugin
            part = PartConfig(plugin=plugin, options=store.attach_options())
        else:
            server = Server(
                f"ipc://{launcher.run_dir}/store.sock",
                name="controller",
                token=token,
                heartbeat=SUPERVISED,
            )
            serve_service(server, "store", store, DataStore)
            await stack.enter_async_context(server)
            address = server.address
        # Processes end before the store they work on; closing a launcher twice is harmless.
        stack.push_async_callback(launcher.aclose)
        for spec in process_specs(
            self._plan,
            run_dir=launcher.run_dir,
            store=address,
            store_part=part,
            token=token,
            log_dir=self._log_dir,
        ):
            service = _Service(spec, await launcher.start(spec, store))
            if isinstance(spec.role, StageRole):
                service.calls = CallLog.of(launcher.run_dir, spec.role.task.name)
            self._services.append(service)
            group.create_task(self._keep(service), name=f"keep {spec.name}")
        group.create_task(self._watch(group))
        with waits.holding("the start"):
            async with asyncio.TaskGroup() as starting:
                for service in self._services:
                    starting.create_task(self._ready(service))

    async def end(self, name: str, reason: str) -> None:
        """End a process that answers and does not do its work; it comes back, as one that died.

        Raises:
            ServiceError: the launcher started no process that could be ended.
        """
        if not self._plan.chosen["launcher"].capabilities.processes:
            raise ServiceError(
                f"{reason}; in the run's own process it cannot be ended and started again, "
                f"launcher.plugin=local gives it one of its own",
                service=name,
            )
        for service in self._services:
            if service.name == name and name in self.controls:
                service.stuck = f"{reason}, so it was ended"
                await service.process.kill()

    async def one_that_ended(self) -> EndedError | None:
        """The end of a process that does not return, from which broken calls may have followed."""
        watching = {
            asyncio.create_task(service.process.ended()): service
            for service in self._services
            if not (self._up and service.returns)
        }
        if not watching:
            return None
        done, rest = await asyncio.wait(
            watching, timeout=_DEATH_GRACE_S, return_when=asyncio.FIRST_COMPLETED
        )
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        for task in done:
            if task.exception() is None:
                return _ended(watching[task], task.result())
        return None

    async def _ready(self, service: _Service) -> None:
        with self._waits.holding(f"{service.name} loads and does not answer yet"):
            await service.process.ready()
        self.controls[service.name] = service.process.control(CONTROLS[service.spec.role.role])
        self._watchdog.beat(service.name, self.clock.now())
        service.stuck = ""

    async def _keep(self, service: _Service) -> None:
        """Wait for its end, and start it again, as often as it may."""
        while True:
            end = await service.process.ended()
            self._watchdog.forget(service.name)
            if not (self._up and service.returns) or end.final:
                raise _ended(service, end)
            await self._leave(service, end)
            try:
                await self._return(service)
            except PeerLostError as error:
                # Of the new process, whose end the next turn finds.
                if not await _ends(service.process):
                    raise
                _log.warning("%s did not come back: %s", service.name, error)

    async def _leave(self, service: _Service, end: End) -> None:
        """It is gone: what it held goes to others, if it may return; else the run ends."""
        name, limits = service.name, self.restarts
        self.controls.pop(name, None)
        self._left(name)
        of_rows = service.calls is not None and service.calls.hung(name)
        rows = await self._give_back(name)
        tasks = (await self._store.stats(drops_after=NO_DROPS)).tasks
        if of_rows and isinstance(service.spec.role, StageRole):
            finished = tasks[service.spec.role.task.name].committed
        else:  # others may have to wait for what this one does
            finished = sum(task.committed for task in tasks.values())
        refusal = limits.refusal(name, self.clock.now(), finished=finished, of_rows=of_rows)
        await service.process.bury()
        if refusal:
            often = f"{name} was started again {refusal} (watchdog.restarts) and died once more: "
            raise _ended(service, end, often if limits.limit else "")
        _log.warning(
            "%s%s; %sit is started again (restart %d)",
            service.stuck or end.words.partition(";")[0],
            ", in a call that did not return" if of_rows else "",
            f"its {rows} rows go to others and " if rows else "",
            limits.count[name],
        )

    async def _return(self, service: _Service) -> None:
        """Start it, wait until it answers, let it work."""
        with self._waits.holding(f"{service.name} is started again"):
            service.process = await self._launcher.start(service.spec, self._store)
            await self._ready(service)
        # A hand-out may have been on its way to the old one when it died.
        await self._give_back(service.name)
        control = self.controls[service.name]
        await control.start()
        await self._back(service.name, control)

    async def _give_back(self, name: str) -> int:
        """What a dead process holds; where the store cannot do it, its leases expire."""
        if not isinstance(self._store, SupportsEviction):
            return 0
        return await self._store.evict(name)

    async def _watch(self, group: asyncio.TaskGroup) -> None:
        """Ask everybody for a sign of life, and end those that give none."""
        asked: dict[str, asyncio.Task[None]] = {}
        while True:
            await asyncio.sleep(min(1.0, self._stuck_s / 5))
            now = self.clock.now()
            stuck = self._watchdog.stuck(now)
            for service in self._services:
                name = service.name
                if name in stuck:
                    service.stuck = (
                        f"{name} gave no sign of life for {self._stuck_s:g} s "
                        f"(watchdog.stuck_s), so it was ended"
                    )
                    await service.process.kill()
                elif name in self.controls and (name not in asked or asked[name].done()):
                    asked[name] = group.create_task(self._ask(service))

    async def _ask(self, service: _Service) -> None:
        process = service.process
        try:
            await process.beat()
        except ServiceError as error:
            _log.debug("%s gave no sign of life: %s", service.name, error)
            return  # it is dead, or counts as stuck soon
        if process is service.process and service.name in self.controls:
            self._watchdog.beat(service.name, self.clock.now())


def _ended(service: _Service, end: End, often: str = "") -> EndedError:
    words = f"{service.stuck}: {end.words}" if service.stuck else end.words
    trains = isinstance(service.spec.role, TrainerRole | RankRole)
    return EndedError(f"{often}{words}", service=service.name, trains=trains)


async def _ends(process: RunningProcess) -> bool:
    try:
        await asyncio.wait_for(process.ended(), _DEATH_GRACE_S)
    except TimeoutError:
        return False
    return True
