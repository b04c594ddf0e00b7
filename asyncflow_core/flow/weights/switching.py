"""Carrying out the weight protocol: calls to replicas and trainer, each on its own task."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from asyncflow_core.config import WeightSyncConfig
from asyncflow_core.errors import AsyncFlowError, PeerLostError, ServiceError
from asyncflow_core.flow.processes.control import RolloutControl, TrainerControl
from asyncflow_core.flow.weights.instructions import (
    Commit,
    Compare,
    Fail,
    Instruction,
    Retire,
    Stage,
)
from asyncflow_core.flow.weights.protocol import WeightProtocol
from asyncflow_core.services.rollout import SwitchMode
from asyncflow_core.services.weight_sync import PublishedWeights

__all__ = ["Switching"]

_log = logging.getLogger(__name__)


class Switching:
    """Brings published weights to all replicas.

    One that served a version of this run before and cannot be brought to another is ended, to come
    back and catch up. One that never did, or serves what was not published, ends the run.

    Concurrency: replicas are switched side by side; a failure ends the task group it was given.
    """

    def __init__(
        self,
        replicas: Mapping[str, RolloutControl],
        trainer: TrainerControl,
        mode: SwitchMode,
        group: asyncio.TaskGroup,
        config: WeightSyncConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        concurrent_versions: int = 2,
        end: Callable[[str, str], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Take connected processes.

        Args:
            replicas: by name.
            trainer: publishes.
            mode: when weights that are there begin to serve.
            group: the run's; calls are tasks of it.
            config: limits.
            clock: the run's time.
            concurrent_versions: how many the transport holds at once.
            end: ends a replica by name, for a reason; None: every failure ends the run.
        """
        self._clock = clock
        self._end = end
        self._served: set[str] = set()
        self._one_at_a_time = concurrent_versions == 1
        self._replicas = dict(replicas)
        self._trainer = trainer
        self._mode = mode
        self._group = group
        self._protocol = WeightProtocol(
            stage_timeout_s=config.stage_timeout_s,
            commit_timeout_s=config.commit_timeout_s,
            attempts=config.attempts,
            compare_every=config.verify_every,
        )
        self._published: dict[tuple[int, int], PublishedWeights] = {}
        self._settled = asyncio.Event()
        self.stage_s = 0.0
        """Seconds the last stage took."""
        self.commit_s = 0.0
        """Seconds the last commit took; with drain, the wait for running responses included."""
        self.compared = 0
        """Comparisons, bit for bit, that found no difference."""

    def start(self) -> None:
        """Let all replicas join, and watch deadlines."""
        for name in self._replicas:
            self._carry_out(self._protocol.join(name, self._clock()))
        self._group.create_task(self._watch())

    async def publish(self, version: int, life: int, *, overlaps: bool = False) -> PublishedWeights:
        """Let the trainer publish; with `overlaps` replicas stage what comes while it does."""
        if self._one_at_a_time:
            self._carry_out(self._protocol.withdraw())
        publishing = asyncio.ensure_future(self._trainer.publish(version, life))
        begun = asyncio.ensure_future(self._trainer.coming(version, life)) if overlaps else None
        try:
            if begun is not None:  # an export that fails before its first bucket never begins
                await asyncio.wait({publishing, begun}, return_when=asyncio.FIRST_COMPLETED)
                if not publishing.done() and (coming := begun.result()) is not None:
                    self._coming(coming)
            weights = await publishing
        finally:
            publishing.cancel()
            if begun is not None:
                begun.cancel()
        self.published(weights)
        return weights

    def _coming(self, weights: PublishedWeights) -> None:
        manifest = weights.manifest
        found = self._protocol.coming(manifest.version, self._clock(), life=manifest.life)
        self._published[manifest.life, manifest.version] = weights
        self._settled.clear()
        self._carry_out(found)

    def published(self, weights: PublishedWeights) -> None:
        """A new version can be fetched, all of it."""
        manifest, failures = weights.manifest, self._protocol.failures
        found = self._protocol.published(
            manifest.version, manifest.checksum, self._clock(), life=manifest.life
        )
        if self._protocol.failures > failures:
            _log.warning("replicas hold other bytes of version %d than came", manifest.version)
        self._published[manifest.life, manifest.version] = weights
        self._settled.clear()
        self._carry_out(found)

    def joined(self, replica: str, control: RolloutControl) -> None:
        """A replica came up again, with nothing confirmed: it catches up first."""
        self._replicas[replica] = control
        self._settled.clear()
        self._carry_out(self._protocol.join(replica, self._clock()))

    def left(self, replica: str) -> None:
        """A replica is gone; nobody waits for it any more."""
        self._replicas.pop(replica, None)
        self._carry_out(self._protocol.leave(replica))

    @property
    def failures(self) -> int:
        """Stages and commits that failed, and were tried again or raised."""
        return self._protocol.failures

    def waiting(self) -> list[str]:
        """One line for each replica that is on its way to a version."""
        return self._protocol.waiting(self._clock())

    async def settled(self) -> None:
        """Wait until every replica serves the newest version."""
        await self._settled.wait()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._carry_out(self._protocol.tick(self._clock()))

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                # Whatever is needed is looked up now: the replica may leave before its task begins.
                case Stage(replica, version, call, life):
                    control, weights = self._replicas[replica], self._published[life, version]
                    self._spawn(self._stage(replica, control, weights, call))
                case Commit(replica, version, call):
                    self._spawn(self._commit(replica, self._replicas[replica], version, call))
                case Compare(replica, version, call, life):
                    control, weights = self._replicas[replica], self._published[life, version]
                    self._spawn(self._compare(replica, control, weights, call))
                case Retire(version, life):
                    self._published.pop((life, version), None)
                    self._spawn(self._trainer.retire(version, life))
                case Fail(replica, version, reason, final):
                    words = f"{replica} cannot be brought to weights version {version}: {reason}"
                    if self._end is None or final or replica not in self._served:
                        self._spawn(_raise(ServiceError(words, service=replica)))
                    else:
                        self._spawn(self._end(replica, words))
        if self._protocol.settled():
            self._settled.set()

    def _spawn(self, call: Coroutine[Any, Any, None]) -> None:
        self._group.create_task(call)

    async def _stage(
        self, replica: str, control: RolloutControl, published: PublishedWeights, call: int
    ) -> None:
        try:
            staged = await control.stage(published)
        except AsyncFlowError as error:
            self._failed(replica, call, error)
            return
        self.stage_s = staged.wall_s
        failures = self._protocol.failures
        found = self._protocol.staged(replica, call, staged.checksum, self._clock())
        if self._protocol.failures > failures:
            _log.warning(
                "%s holds other bytes than were published as version %d", replica, staged.version
            )
        self._carry_out(found)

    async def _commit(self, replica: str, control: RolloutControl, version: int, call: int) -> None:
        start = time.perf_counter()
        try:
            await control.commit(version, self._mode)
        except AsyncFlowError as error:
            self._failed(replica, call, error)
            return
        self.commit_s = time.perf_counter() - start
        self._served.add(replica)
        self._carry_out(self._protocol.committed(replica, call, self._clock()))

    async def _compare(
        self, replica: str, control: RolloutControl, published: PublishedWeights, call: int
    ) -> None:
        try:
            difference = await control.compare(published)
        except AsyncFlowError as error:
            self._failed(replica, call, error)
            return
        self.compared += not difference
        self._carry_out(self._protocol.compared(replica, call, difference, self._clock()))

    def _failed(self, replica: str, call: int, error: AsyncFlowError) -> None:
        if isinstance(error, PeerLostError) and error.service == replica:
            # It is dead, or counts as stuck soon: `left` is called then, and what is under way
            # ends; a deadline passes only if nobody finds it.
            _log.warning("%s is gone while it takes weights: %s", replica, error)
            return
        _log.warning("%s failed to take weights: %s", replica, error)
        self._carry_out(self._protocol.failed(replica, call, str(error), self._clock()))


async def _raise(error: ServiceError) -> None:
    raise error
