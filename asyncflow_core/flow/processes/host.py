"""What lives in a service's process: the service, its worker, and what answers the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from asyncflow_core.config import PartConfig
from asyncflow_core.errors import (
    ConfigError,
    ServiceClosedError,
)
from asyncflow_core.flow.building import build
from asyncflow_core.flow.planning.stages import (
    function_contract,
    load_function,
    make_stage,
    plugin_contract,
)
from asyncflow_core.flow.processes.answering import RolloutReplica, StageProcess
from asyncflow_core.flow.processes.control import (
    RankControl,
    RolloutControl,
    StageControl,
    TrainerControl,
)
from asyncflow_core.flow.processes.launch import (
    ProcessSpec,
    RankRole,
    RolloutRole,
    StageRole,
    TrainerRole,
)
from asyncflow_core.flow.working.calls import CallLog
from asyncflow_core.flow.working.costs import Costs
from asyncflow_core.flow.working.fanout import Ranks
from asyncflow_core.flow.working.models import StageModel, logprobs_work, with_model
from asyncflow_core.flow.working.rank import TrainerRank
from asyncflow_core.flow.working.stage_work import stage_work
from asyncflow_core.flow.working.step import TrainSettings
from asyncflow_core.flow.working.threads import DaemonThread
from asyncflow_core.flow.working.train import TrainWorker
from asyncflow_core.flow.working.worker import Work, Worker
from asyncflow_core.parts import PartContext, Stage, StageContract, Tokenizer
from asyncflow_core.registry import Registry
from asyncflow_core.services.base import Service
from asyncflow_core.services.data_store import DataStore
from asyncflow_core.services.rollout import (
    SamplingParams,
)
from asyncflow_core.services.trainer import LossSpec
from asyncflow_core.services.weight_sync import WeightSync

__all__ = [
    "CONTROLS",
    "Connect",
    "Host",
    "build_part",
]

Connect = Callable[[str, str], Awaitable[RankControl]]
"""From an address and a name to a rank."""

CONTROLS: dict[str, type[Any]] = {
    "rollout": RolloutControl,
    "trainer": TrainerControl,
    "rank": RankControl,
    "stage": StageControl,
}
"""What a process of each role answers."""


def build_part(registry: Registry, kind: str, part: PartConfig, ctx: PartContext) -> Any:
    """Build what a plugin offers; its options were validated when the run was planned."""
    plugin = registry.get(kind, part.plugin)
    return build(plugin, plugin.parse_options(part.options), ctx)


class Host:
    """One process's contents: `control` answers, `failed` ends when the worker does."""

    def __init__(
        self, spec: ProcessSpec, store: DataStore | None, registry: Registry, connect: Connect
    ) -> None:
        """Keep the arguments; `open` builds. `connect` finds a trainer's further ranks."""
        self._spec = spec
        self._connect = connect
        self._maybe_store = store
        self._registry = registry
        self._stack = AsyncExitStack()
        self.control: Any = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._worker: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Build and open everything; what opened is closed again if something fails."""
        role = self._spec.role
        try:
            if isinstance(role, RolloutRole):
                self.control = await self._open_rollout(role)
            elif isinstance(role, TrainerRole):
                self.control = await self._open_trainer(role)
            elif isinstance(role, RankRole):
                self.control = await self._open_rank(role)
            elif isinstance(role, StageRole):
                self.control = await self._open_stage(role)
            else:
                self.control = await self._open_service()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop the worker, close every service."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        if not self.failed.cancel() and not self.failed.cancelled():
            self.failed.exception()  # seen, whether anybody asked or not
        await self._stack.aclose()

    def run(self, worker: Worker) -> None:
        """Let a worker pull in the background."""
        self._worker = asyncio.create_task(worker.run(), name=f"{self._spec.name} worker")
        self._worker.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self.failed.done():
            return
        self.failed.set_exception(task.exception() or ServiceClosedError("the worker ended"))

    @property
    def _store(self) -> DataStore:
        if self._maybe_store is None:
            raise ConfigError(f"process {self._spec.name!r} needs the address of a data store")
        return self._maybe_store

    def _context(self, tokenizer: Tokenizer | None = None) -> PartContext:
        spec = self._spec
        return PartContext(
            name=spec.name,
            seed=spec.seed,
            rank=spec.rank,
            world_size=spec.world_size,
            run_dir=Path(spec.run_dir),
            tokenizer=tokenizer or self._tokenizer(spec.tokenizer),
            registry=self._registry,
        )

    def _tokenizer(self, part: PartConfig | None) -> Tokenizer | None:
        if part is None:
            return None
        made: Tokenizer = build_part(
            self._registry, "tokenizer", part, PartContext(registry=self._registry)
        )
        return made

    async def _open_service(self) -> Any:
        part = PartConfig(plugin=self._spec.plugin, options=self._spec.options)
        service: Service = build_part(self._registry, self._spec.kind, part, self._context())
        return await self._stack.enter_async_context(service)

    async def _open_weight_sync(self, part: PartConfig) -> WeightSync:
        made: WeightSync = build_part(self._registry, "weight_sync", part, self._context())
        return await self._stack.enter_async_context(made)

    async def _open_rollout(self, role: RolloutRole) -> RolloutControl:
        weight_sync = await self._open_weight_sync(role.weight_sync)
        service = await self._open_service()
        return RolloutReplica(self.run, self._spec, role, service, weight_sync, self._store)

    async def _open_rank(self, role: RankRole) -> TrainerRank:
        sync = None if role.weight_sync is None else await self._open_weight_sync(role.weight_sync)
        return TrainerRank(await self._open_service(), self._store, sync)

    async def _open_trainer(self, role: TrainerRole) -> TrainerControl:
        weight_sync = await self._open_weight_sync(role.weight_sync)
        trainer = await self._open_service()
        others = await self._others(
            {f"trainer-{number}": address for number, address in enumerate(role.ranks, 1)}
        )
        first = TrainerRank(trainer, self._store, weight_sync)
        ranks = Ranks(first, others, overlaps_export=role.overlaps_export)
        settings = TrainSettings(
            task=role.task,
            columns=role.columns,
            loss=LossSpec(role.loss.plugin, role.loss.options),
            groups_per_step=role.groups_per_step,
            group_size=role.group_size,
            updates_per_step=role.updates_per_step,
            max_staleness=role.max_staleness,
            micro_batch_tokens=role.micro_batch_tokens,
            whole_batch=role.whole_batch,
            proximal=role.proximal,
            lease_policy=role.lease_policy,
            too_stale=role.too_stale,
        )
        return TrainWorker(self._store, ranks, settings)

    async def _others(self, addresses: Mapping[str, str]) -> list[RankControl]:
        return [await self._connect(address, name) for name, address in addresses.items()]

    async def _open_stage(self, role: StageRole) -> StageControl:
        stage = role.stage
        # Log-probs are no calls on a thread: there the worker counts.
        costs = None if role.model and role.model.kind == "trainer" else Costs()
        if role.model:
            work = await self._model_work(role, costs)
        else:
            work = self._stage_work(role, costs)
        worker = Worker(
            self._store,
            role.task,
            work,
            requester=self._spec.name,
            rows_in_flight=2 * stage.rows,
            rows_per_lease=stage.rows,
            policy=stage.lease_policy,
            columns=role.columns,
            costs=costs,
        )
        return StageProcess(self.run, worker)

    async def _model_work(self, role: StageRole, costs: Costs | None) -> Work:
        """Of a stage with a model, an instance of which is this process's service."""
        assert role.model is not None
        service, contract = await self._open_service(), function_contract(role.stage)
        if role.model.kind == "trainer":
            others = await self._others(role.ranks)
            return logprobs_work(Ranks(TrainerRank(service, self._store), others), contract)
        tokenizer = self._tokenizer(role.model.tokenizer or self._spec.tokenizer)
        model = StageModel(
            service,
            SamplingParams(**role.model.sampling.model_dump()),
            tokenizer,
            self._spec.seed,
            asyncio.get_running_loop(),
        )
        stage = with_model(load_function(role.stage.function), model)
        return self._on_thread(role, stage, contract, costs)

    def _stage_work(self, role: StageRole, costs: Costs | None) -> Work:
        ctx, stage = self._context(), role.stage
        plugin = self._registry.get("stage", stage.plugin) if stage.plugin else None
        options = plugin.parse_options(stage.options) if plugin else None
        contract = plugin_contract(plugin, options) if plugin else function_contract(stage)
        made = make_stage(stage, plugin, options, ctx)
        return self._on_thread(role, made, contract, costs)

    def _on_thread(
        self, role: StageRole, stage: Stage, contract: StageContract, costs: Costs | None
    ) -> Work:
        executor = DaemonThread(self._spec.name)
        self._stack.callback(executor.shutdown, wait=False, cancel_futures=True)
        return stage_work(
            stage,
            contract,
            self._spec.name,
            executor,
            timeout_s=role.stage.timeout_s,
            calls=CallLog.of(Path(self._spec.run_dir), role.task.name),
            costs=costs,
        )
