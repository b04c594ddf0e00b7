"""Which processes a plan needs, and what each is told. Pure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncflow_core.config import PartConfig, ServiceConfig, StageConfig
from asyncflow_core.flow.planning.plan import Plan
from asyncflow_core.flow.processes.launch import (
    ProcessSpec,
    RankRole,
    RolloutRole,
    StageRole,
    TrainerRole,
)
from asyncflow_core.services.trainer import TrainerCapabilities

__all__ = ["in_processes", "process_specs"]


def in_processes(stage: StageConfig) -> bool:
    """Whether a stage runs in worker processes: by a function `module:name`, or with a model."""
    return bool(stage.model) or (isinstance(stage.function, str) and bool(stage.function))


def process_specs(
    plan: Plan,
    *,
    run_dir: Path,
    store: str,
    store_part: PartConfig | None = None,
    token: str,
    log_dir: Path,
) -> Iterator[ProcessSpec]:
    """Every process of a run: rollout replicas, trainer ranks, stages by `module:name`.

    Args:
        plan: the checked configuration.
        run_dir: for sockets; ipc addresses are made of it.
        store: address of a data store that core serves.
        store_part: how to use one that serves itself.
        token: secret of the run.
        log_dir: where output goes, a file a process.
    """
    config = plan.config
    weight_sync = _part(plan, "weight_sync")

    def spec(
        name: str, section: ServiceConfig | None, devices: Sequence[int] = (), **fields: Any
    ) -> ProcessSpec:
        visible = ",".join(map(str, devices))
        return ProcessSpec(
            name=name,
            seed=config.seed,
            run_dir=str(run_dir),
            address=f"ipc://{run_dir}/{name}.sock",
            token=token,
            store=store,
            store_part=store_part,
            tokenizer=_part(plan, "tokenizer"),
            python=section.python if section else sys.executable,
            env={"CUDA_VISIBLE_DEVICES": visible} if visible else {},
            log_path=str(log_dir / f"{name}.log"),
            **fields,
        )

    share = len(config.rollout.devices) // config.rollout.replicas
    for number in range(config.rollout.replicas):
        # Which requests run beside each other may change the last bits of a result.
        by_key = config.workflow.preset == "sequential" and config.rollout.replicas > 1
        role = RolloutRole(
            task=plan.tasks["rollout"].spec,
            share=(number, config.rollout.replicas) if by_key else None,
            sampling=config.rollout.sampling,
            rows_in_flight=config.rollout.rows_in_flight,
            lease_policy=config.rollout.lease_policy,
            weight_sync=weight_sync,
        )
        chosen = _part(plan, "rollout")
        yield spec(
            f"rollout-{number}",
            config.rollout,
            config.rollout.devices[number * share : (number + 1) * share],
            kind="rollout",
            plugin=chosen.plugin,
            options=chosen.options,
            role=role,
        )
    chosen = _part(plan, "trainer")
    for rank in range(config.trainer.world_size):
        yield spec(
            f"trainer-{rank}",
            config.trainer,
            config.trainer.devices,
            kind="trainer",
            plugin=chosen.plugin,
            options=chosen.options,
            group="trainer",
            rank=rank,
            world_size=config.trainer.world_size,
            role=_rank_role(plan, weight_sync)
            if rank
            else _trainer_role(plan, weight_sync, run_dir),
        )
    for name, stage in config.stages.items():
        if stage.model:
            yield from _model_specs(plan, name, spec, run_dir)
        elif in_processes(stage):
            for number in range(stage.workers):
                yield spec(
                    f"{name}-{number}",
                    None,
                    kind="stage",
                    role=_stage_role(plan, name),
                )


def _model_specs(
    plan: Plan, name: str, spec: Callable[..., ProcessSpec], run_dir: Path
) -> Iterator[ProcessSpec]:
    """The processes of a stage with a model: an instance a worker, of one or more ranks."""
    stage = plan.config.stages[name]
    model, chosen = plan.config.models[stage.model], _part(plan, f"models.{stage.model}")
    share = len(model.devices) // stage.workers
    for number in range(stage.workers):
        group = f"{name}-{number}"
        others = [f"{group}-rank{rank}" for rank in range(1, model.world_size)]
        for rank, process in enumerate([group, *others]):
            ranks = {other: f"ipc://{run_dir}/{other}.sock" for other in others}
            leading = _stage_role(plan, name, model=model, ranks=ranks)
            yield spec(
                process,
                model,
                model.devices[number * share : (number + 1) * share],
                kind=model.kind,
                plugin=chosen.plugin,
                options=chosen.options,
                group=group,
                rank=rank,
                world_size=model.world_size,
                role=RankRole() if rank else leading,
            )


def _stage_role(plan: Plan, name: str, **fields: Any) -> StageRole:
    task, stage = plan.tasks[name], plan.config.stages[name]
    return StageRole(task=task.spec, columns=task.columns, stage=stage, **fields)


def _trainer_role(plan: Plan, weight_sync: PartConfig, run_dir: Path) -> TrainerRole:
    config, flow = plan.config, plan.config.workflow
    proximal = plan.tasks.get("proximal")
    return TrainerRole(
        task=plan.tasks["train"].spec,
        columns=plan.tasks["train"].columns,
        loss=_part(plan, "loss"),
        groups_per_step=flow.groups_per_step,
        group_size=flow.group_size,
        updates_per_step=flow.updates_per_step,
        max_staleness=flow.bound,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        whole_batch=flow.preset == "sequential",
        lease_policy=config.trainer.lease_policy,
        too_stale=flow.too_stale,
        weight_sync=weight_sync,
        proximal=proximal and proximal.spec,
        overlaps_export=plan.overlaps_export,
        ranks=tuple(
            f"ipc://{run_dir}/trainer-{rank}.sock" for rank in range(1, config.trainer.world_size)
        ),
    )


def _rank_role(plan: Plan, weight_sync: PartConfig) -> RankRole:
    able: TrainerCapabilities = plan.chosen["trainer"].capabilities
    return RankRole(weight_sync=weight_sync if able.sharded_export else None)


def _part(plan: Plan, section: str) -> PartConfig:
    chosen = plan.chosen[section]
    return PartConfig(plugin=chosen.plugin.name, options=chosen.dump())
