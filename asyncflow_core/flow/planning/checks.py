"""What the chosen plugins can do against what the configuration asks of them. Pure.

A check whose plugins were not all found is left out: their own faults come first.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from asyncflow_core.config import ModelConfig, RolloutConfig, RunConfig, ServiceConfig
from asyncflow_core.flow.processes.launch import LauncherCapabilities
from asyncflow_core.flow.running.room import row_bytes
from asyncflow_core.services.data_store import DataStoreCapabilities
from asyncflow_core.services.rollout import RolloutCapabilities, SamplingParams
from asyncflow_core.services.trainer import LossCapabilities, TrainerCapabilities
from asyncflow_core.services.weight_sync import WeightSyncCapabilities

__all__ = ["CAPABILITIES", "Fault", "capability_faults"]

Fault = tuple[tuple[str, ...], str]
"""Path in the configuration, and what is wrong."""

CAPABILITIES: Mapping[str, type[Any]] = {
    "data_store": DataStoreCapabilities,
    "launcher": LauncherCapabilities,
    "loss": LossCapabilities,
    "rollout": RolloutCapabilities,
    "trainer": TrainerCapabilities,
    "weight_sync": WeightSyncCapabilities,
}
"""The record that a plugin of a kind must declare."""


def capability_faults(config: RunConfig, able: Mapping[str, Any]) -> Iterator[Fault]:
    """Everything the chosen plugins cannot do.

    Args:
        config: the whole configuration.
        able: section to declared capabilities, for the sections whose plugin was found.
    """
    for sections, check in _CHECKS:
        if all(section in able for section in sections):
            yield from check(config, *(able[section] for section in sections))
    for name, model in config.models.items():
        if model.kind == "rollout" and (found := able.get(f"models.{name}")) is not None:
            yield from _sampling_of(("models", name), model, found)


def _sampling(config: RunConfig, rollout: RolloutCapabilities) -> Iterator[Fault]:
    yield from _sampling_of(("rollout",), config.rollout, rollout)


def _sampling_of(
    at: tuple[str, ...], section: RolloutConfig | ModelConfig, able: RolloutCapabilities
) -> Iterator[Fault]:
    """What an engine that generates cannot do of the sampling that its section asks for."""
    at, who = (*at, "sampling"), f"rollout plugin {section.plugin!r}"
    sampling, defaults = SamplingParams(**section.sampling.model_dump()), SamplingParams()
    for name in SamplingParams.__dataclass_fields__:
        if getattr(sampling, name) != getattr(defaults, name) and name not in able.sampling:
            yield (
                (*at, name),
                f"{who} does not honour {name}; it takes {', '.join(sorted(able.sampling))}",
            )
    if able.max_tokens is not None and sampling.max_new_tokens >= able.max_tokens:
        yield (
            (*at, "max_new_tokens"),
            f"{sampling.max_new_tokens} tokens and a prompt of at least one are more than "
            f"{who} takes of this model, {able.max_tokens} tokens with the prompt; lower "
            f"it so far that prompts have room",
        )


def _truncation(config: RunConfig, trainer: TrainerCapabilities) -> Iterator[Fault]:
    if _params(config).truncates and not trainer.truncated_sampling:
        yield (
            ("rollout", "sampling"),
            f"trainer plugin {config.trainer.plugin!r} cannot mask truncated sampling as the "
            f"sampler does; leave top_p, top_k and min_p off",
        )


def _params(config: RunConfig) -> SamplingParams:
    return SamplingParams(**config.rollout.sampling.model_dump())


def _switch_mode(config: RunConfig, rollout: RolloutCapabilities) -> Iterator[Fault]:
    wanted = config.rollout.switch_mode
    if wanted != "auto" and wanted not in rollout.switch_modes:
        yield (
            ("rollout", "switch_mode"),
            f"rollout plugin {config.rollout.plugin!r} cannot {wanted}; it can "
            f"{', '.join(sorted(rollout.switch_modes))}",
        )


def _weights_taken(
    config: RunConfig, rollout: RolloutCapabilities, weights: WeightSyncCapabilities
) -> Iterator[Fault]:
    if weights.source not in rollout.weight_sources:
        yield (
            ("weight_sync",),
            f"{config.weight_sync.plugin!r} hands over {weights.source}, but rollout plugin "
            f"{config.rollout.plugin!r} takes {', '.join(sorted(rollout.weight_sources))}; choose "
            f"another transport, `asyncflow plugins` lists them",
        )


def _weights_compared(
    config: RunConfig, rollout: RolloutCapabilities, weights: WeightSyncCapabilities
) -> Iterator[Fault]:
    if not config.weight_sync.verify_every:
        return
    path = ("weight_sync", "verify_every")
    if not rollout.readback:
        name = config.rollout.plugin
        yield path, f"rollout plugin {name!r} cannot give its weights back; leave it out"
    if weights.source != "buckets":
        yield (
            path,
            f"{config.weight_sync.plugin!r} hands over {weights.source}, and only buckets can be "
            f"fetched again to be compared; leave it out",
        )


def _sharded(
    config: RunConfig, trainer: TrainerCapabilities, weights: WeightSyncCapabilities
) -> Iterator[Fault]:
    if trainer.sharded_export and config.trainer.world_size > 1 and weights.source != "buckets":
        yield (
            ("weight_sync",),
            f"{config.weight_sync.plugin!r} hands over {weights.source}, which cannot be joined "
            f"from the parts that the ranks of trainer plugin {config.trainer.plugin!r} export; "
            f"use a transport of buckets",
        )


def _weights_reach(
    config: RunConfig, launcher: LauncherCapabilities, weights: WeightSyncCapabilities
) -> Iterator[Fault]:
    if launcher.locality not in weights.localities:
        yield (
            ("weight_sync",),
            f"{config.weight_sync.plugin!r} reaches {', '.join(sorted(weights.localities))}, "
            f"but launcher {config.launcher.plugin!r} puts services a {launcher.locality} apart; "
            f"choose another transport, `asyncflow plugins` lists them",
        )


def _ranks(config: RunConfig, trainer: TrainerCapabilities) -> Iterator[Fault]:
    limit = trainer.max_world_size
    if limit is not None and config.trainer.world_size > limit:
        yield (
            ("trainer", "world_size"),
            f"trainer plugin {config.trainer.plugin!r} runs on at most {limit} ranks",
        )


def _loss(
    config: RunConfig, trainer: TrainerCapabilities, loss: LossCapabilities
) -> Iterator[Fault]:
    if loss.arrays != trainer.loss_arrays:
        yield (
            ("loss", "plugin"),
            f"loss {config.loss.plugin!r} works on {loss.arrays} arrays, trainer plugin "
            f"{config.trainer.plugin!r} on {trainer.loss_arrays}; choose another loss, "
            f"`asyncflow plugins` lists them",
        )
    if loss.needs_entropy and not trainer.entropy:
        yield (
            ("loss", "options"),
            f"loss {config.loss.plugin!r} asks for entropy, which trainer plugin "
            f"{config.trainer.plugin!r} does not give",
        )


def _store_holds(config: RunConfig, store: DataStoreCapabilities) -> Iterator[Fault]:
    """A store that cannot hold every batch that may be open would wait for room for ever."""
    flow = config.workflow
    batches = min(flow.steps, flow.bound + 1)
    groups = flow.groups_per_step + flow.extra_groups
    rows = batches * groups * flow.group_size
    nbytes = rows * row_bytes(0, config.rollout.sampling.max_new_tokens)
    for unit, needed, there in (
        ("rows", rows, store.capacity_rows),
        ("bytes", nbytes, store.capacity_bytes),
    ):
        if there is not None and there < needed:
            yield (
                ("data_store", "options", f"capacity_{unit}"),
                f"the store holds {there} {unit}, but {batches} batch(es) of "
                f"{groups} x {flow.group_size} rows may be open at max_staleness "
                f"{flow.bound}, which take {needed}; raise it, or make batches smaller",
            )


def _lease_policies(config: RunConfig, store: DataStoreCapabilities) -> Iterator[Fault]:
    sections: list[tuple[tuple[str, ...], str]] = [
        (("rollout",), config.rollout.lease_policy),
        (("trainer",), config.trainer.lease_policy),
        *((("stages", name), stage.lease_policy) for name, stage in config.stages.items()),
    ]
    for path, policy in sections:
        if policy not in store.lease_policies:
            near = difflib.get_close_matches(policy, store.lease_policies, n=1, cutoff=0.5)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            yield (
                (*path, "lease_policy"),
                f"data store {config.data_store.plugin!r} has no lease policy {policy!r}, it has "
                f"{', '.join(sorted(store.lease_policies))}{meant}",
            )


def _devices(config: RunConfig) -> Iterator[Fault]:
    yield from _process("rollout", config.rollout, config.rollout.replicas, "replicas")
    yield from _process("trainer", config.trainer, config.trainer.world_size, "ranks")
    both = sorted(set(config.rollout.devices) & set(config.trainer.devices))
    if both:
        yield (
            ("trainer", "devices"),
            f"devices {both} are given to rollout and trainer; a device serves one of them",
        )


def _process(name: str, section: ServiceConfig, shares: int, what: str) -> Iterator[Fault]:
    if not os.access(section.python, os.X_OK) or os.path.isdir(section.python):
        yield (name, "python"), f"there is no interpreter at {section.python!r}"
    devices = section.devices
    if len(set(devices)) < len(devices):
        yield (name, "devices"), f"{list(devices)} names a device twice"
    if len(devices) % shares:
        yield (
            (name, "devices"),
            f"{len(devices)} devices do not divide among {shares} {what}",
        )


def _launched(config: RunConfig, launcher: LauncherCapabilities) -> Iterator[Fault]:
    if launcher.processes:
        return
    defaults = {"python": sys.executable, "devices": ()}
    for name, section in (("rollout", config.rollout), ("trainer", config.trainer)):
        for field, default in defaults.items():
            if getattr(section, field) != default:
                yield (
                    (name, field),
                    f"launcher {config.launcher.plugin!r} starts no processes, so {field} has no "
                    f"effect; leave it out, or use launcher local",
                )


_CHECKS: tuple[tuple[tuple[str, ...], Callable[..., Iterator[Fault]]], ...] = (
    ((), _devices),
    (("rollout",), _sampling),
    (("rollout",), _switch_mode),
    (("trainer",), _truncation),
    (("trainer",), _ranks),
    (("trainer", "loss"), _loss),
    (("rollout", "weight_sync"), _weights_taken),
    (("rollout", "weight_sync"), _weights_compared),
    (("trainer", "weight_sync"), _sharded),
    (("launcher", "weight_sync"), _weights_reach),
    (("launcher",), _launched),
    (("data_store",), _store_holds),
    (("data_store",), _lease_policies),
)
