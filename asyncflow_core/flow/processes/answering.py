"""What answers the controller in the process of a rollout or of a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from asyncflow_core.batch import Key
from asyncflow_core.errors import ServiceClosedError, UnsupportedCapabilityError
from asyncflow_core.flow.processes.control import RolloutControl, StageControl, WorkStats
from asyncflow_core.flow.processes.launch import ProcessSpec, RolloutRole
from asyncflow_core.flow.weights.compare import first_difference
from asyncflow_core.flow.working.costs import Costs
from asyncflow_core.flow.working.work import rollout_work
from asyncflow_core.flow.working.worker import Worker
from asyncflow_core.services.data_store import DataStore
from asyncflow_core.services.rollout import (
    Completion,
    Rollout,
    RolloutStats,
    SamplingParams,
    StagedWeights,
    SupportsReadback,
    SwitchMode,
)
from asyncflow_core.services.weight_sync import PublishedWeights, WeightSource, WeightSync

__all__ = ["RolloutReplica", "StageProcess"]

Run = Callable[[Worker], None]
"""Lets a worker pull in the background; its failure ends the process."""


class StageProcess(StageControl):
    """A stage's worker."""

    def __init__(self, run: Run, worker: Worker) -> None:
        """Keep the worker; `start` runs it."""
        self._run = run
        self._worker = worker

    async def start(self) -> None:
        """Register, then pull."""
        await self._worker.register()
        self._run(self._worker)

    async def work(self) -> WorkStats:
        """Of its worker."""
        return self._worker.stats()


class RolloutReplica(RolloutControl):
    """A rollout with its worker. It leases only at a version it has confirmed."""

    def __init__(
        self,
        run: Run,
        spec: ProcessSpec,
        role: RolloutRole,
        service: Rollout,
        weight_sync: WeightSync,
        store: DataStore,
    ) -> None:
        """Take opened services."""
        self._run = run
        self._service = service
        self._weight_sync = weight_sync
        self._name = spec.name
        self._version: int | None = None
        self._tokens_finished = self._tokens_unwanted = 0
        self._unwanted: frozenset[Key] = frozenset()
        sampling, costs = SamplingParams(**role.sampling.model_dump()), Costs()
        self._worker = Worker(
            store,
            role.task,
            rollout_work(service, sampling, spec.seed, self._finished, costs),
            requester=spec.name,
            rows_in_flight=role.rows_in_flight,
            policy=role.lease_policy,
            version=self._confirmed,
            share=role.share,
            costs=costs,
        )
        self._pulling = False

    def _finished(self, ended: Sequence[Completion]) -> None:
        for completion in ended:
            self._tokens_finished += len(completion.response_ids)
            if completion.key in self._unwanted:
                self._tokens_unwanted += len(completion.response_ids)

    def _confirmed(self) -> int:
        if self._version is None:
            raise ServiceClosedError(f"{self._name} has no confirmed version yet")
        return self._version

    async def start(self) -> None:
        """Register the task; pulling begins with the first committed version."""
        await self._worker.register()

    async def stage(self, published: PublishedWeights) -> StagedWeights:
        """Fetch and stage."""
        return await self._service.stage_weights(await self._fetch(published))

    async def _fetch(self, published: PublishedWeights) -> WeightSource:
        sources = []
        for part in published.split():
            await self._weight_sync.attach(self._name, part)
            sources.append(await self._weight_sync.fetch(part))
        return WeightSource.joined(published.manifest, sources)

    async def commit(self, version: int, mode: SwitchMode) -> None:
        """Switch; from then on the worker leases with `version`."""
        await self._service.commit_weights(version, mode)
        self._version = version
        if not self._pulling:
            self._pulling = True
            self._run(self._worker)
        self._worker.version_changed()

    async def compare(self, published: PublishedWeights) -> str:
        """Fetch once more and compare."""
        if not isinstance(self._service, SupportsReadback):
            raise UnsupportedCapabilityError(
                f"{self._name} cannot give its weights back to be compared", service=self._name
            )
        return await first_difference(await self._fetch(published), self._service)

    async def work(self) -> WorkStats:
        """Of its worker; what its engine did is in `stats`."""
        return self._worker.stats()

    async def abort(self, keys: Sequence[Key]) -> int:
        """Their rows are dropped: what the engine gives for them is lost, and counted so."""
        self._unwanted = frozenset(keys)
        return await self._service.abort(keys)

    async def stats(self) -> RolloutStats:
        """Of the engine, with what would be lost if it died now."""
        stats = await self._service.stats()
        done = self._tokens_finished + stats.tokens_lost
        return replace(
            stats,
            tokens_lost=stats.tokens_lost + self._tokens_unwanted,
            tokens_unfinished=max(0, stats.tokens_generated - done),
        )
