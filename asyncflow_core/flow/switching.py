"""Carrying out the weight protocol: calls to replicas and trainer, each on its own task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from asyncflow_core.errors import AsyncFlowError, ServiceError
from asyncflow_core.flow.control import RolloutControl, TrainerControl
from asyncflow_core.flow.weights import Commit, Fail, Instruction, Retire, Stage, WeightProtocol
from asyncflow_core.services.rollout import SwitchMode
from asyncflow_core.services.weight_sync import PublishedWeights

__all__ = ["Switching"]


class Switching:
    """Brings published weights to all replicas.

    Concurrency: replicas are switched side by side; a failure ends the task group it was given.
    """

    def __init__(
        self,
        replicas: Mapping[str, RolloutControl],
        trainer: TrainerControl,
        mode: SwitchMode,
        group: asyncio.TaskGroup,
    ) -> None:
        """Take connected processes and the task group of the run."""
        self._replicas = replicas
        self._trainer = trainer
        self._mode = mode
        self._group = group
        self._protocol = WeightProtocol()
        self._published: dict[int, PublishedWeights] = {}
        self._settled = asyncio.Event()
        self.stage_s = 0.0
        """Seconds the last stage took."""

    def start(self) -> None:
        """Let all replicas join, and watch deadlines."""
        for name in self._replicas:
            self._carry_out(self._protocol.join(name, time.monotonic()))
        self._group.create_task(self._watch())

    def published(self, weights: PublishedWeights) -> None:
        """A new version can be fetched."""
        version = weights.manifest.version
        self._published[version] = weights
        self._settled.clear()
        self._carry_out(
            self._protocol.published(version, weights.manifest.checksum, time.monotonic())
        )

    def waiting(self) -> list[str]:
        """One line for each replica that is on its way to a version."""
        return self._protocol.waiting(time.monotonic())

    async def settled(self) -> None:
        """Wait until every replica serves the newest version."""
        await self._settled.wait()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._carry_out(self._protocol.tick(time.monotonic()))

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Stage(replica, version, call):
                    self._spawn(self._stage(replica, version, call))
                case Commit(replica, version, call):
                    self._spawn(self._commit(replica, version, call))
                case Retire(version):
                    del self._published[version]
                    self._spawn(self._trainer.retire(version))
                case Fail(replica, version, reason):
                    self._spawn(_fail(replica, version, reason))
        if self._published and self._protocol.settled():
            self._settled.set()

    def _spawn(self, call: Coroutine[Any, Any, None]) -> None:
        self._group.create_task(call)

    async def _stage(self, replica: str, version: int, call: int) -> None:
        try:
            staged = await self._replicas[replica].stage(self._published[version])
        except AsyncFlowError as error:
            self._carry_out(self._protocol.failed(replica, call, str(error), time.monotonic()))
            return
        self.stage_s = staged.wall_s
        self._carry_out(self._protocol.staged(replica, call, staged.checksum, time.monotonic()))

    async def _commit(self, replica: str, version: int, call: int) -> None:
        try:
            await self._replicas[replica].commit(version, self._mode)
        except AsyncFlowError as error:
            self._carry_out(self._protocol.failed(replica, call, str(error), time.monotonic()))
            return
        self._carry_out(self._protocol.committed(replica, call, time.monotonic()))


async def _fail(replica: str, version: int, reason: str) -> None:
    raise ServiceError(
        f"{replica} cannot be brought to weights version {version}: {reason}", service=replica
    )
