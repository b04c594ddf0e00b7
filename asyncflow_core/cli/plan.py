"""`asyncflow plan`: how many replicas, ranks and workers, by what runs took or a file says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from asyncflow_core.cli.plan_text import Assumed, report
from asyncflow_core.cli.runs import find_run
from asyncflow_core.config import RunConfig
from asyncflow_core.config_source import ConfigSource, parse_overrides
from asyncflow_core.errors import ConfigError
from asyncflow_core.flow.planning.plan import make_plan
from asyncflow_core.flow.simulation.profiles import Profile, measured, read_profile
from asyncflow_core.flow.simulation.search import Candidate, Devices, Found, Sample, search
from asyncflow_core.flow.simulation.simulator import simulate
from asyncflow_core.flow.simulation.times import Times
from asyncflow_core.flow.simulation.workload import Allocation, Workload
from asyncflow_core.registry import Registry
from asyncflow_core.services.trainer import TrainerCapabilities

__all__ = ["Asked", "overrides_of", "plan"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says.

    Attributes:
        profiles: runs, by name or folder. times: a file of times, or None.
        devices: budget; None for what the configuration takes.
        ranks: as in `1,2,4`, or None. workers: as in `reward=1,2`, one of each stage.
        steps: to measure, or None.
    """

    profiles: Sequence[str]
    times: str | None
    devices: int | None
    ranks: str | None
    workers: Sequence[str]
    steps: int | None


def plan(config: str, overrides: Sequence[str], asked: Asked, *, as_json: bool) -> int:
    """Search and print; returns the exit status.

    Raises:
        ConfigError: the configuration or what is asked for is wrong.
        DataError: a run's files cannot be read.
    """
    source = ConfigSource.from_file(config)
    for path, value in parse_overrides(overrides).items():
        source.override(path, value)
    registry = Registry()
    work = Workload.of(make_plan(source, registry))
    devices = Devices.of(work)
    budget = devices.taken(work.allocation) if asked.devices is None else asked.devices
    ranks = _ranks(asked.ranks, budget, work)
    workers = _workers(asked.workers, work)
    profiles = [_profile(name, work) for name in asked.profiles]
    times = _times(profiles, asked.times, work)
    sample = Sample.of(work, times, steps=asked.steps)
    found = search(work, times, sample, devices=budget, ranks=ranks, workers=workers)
    checks = [_checked(profile, work, times, registry, asked.steps) for profile in profiles]
    assumed = _assumed(work, times, profiles, devices, several=len(set(ranks)) > 1)
    best = overrides_of(work, found.best.allocation)
    if as_json:
        print(json.dumps(_facts(found, budget, best, times, assumed), indent=2))
    else:
        print("\n".join(report(work, found, times, assumed, checks, budget=budget, best=best)))
    return 0


def overrides_of(work: Workload, allocation: Allocation) -> list[str]:
    """What turns the configuration into this allocation, as `asyncflow run` takes it."""
    config, found = work.config, []
    devices = Devices.of(work)
    found.append(f"rollout.replicas={allocation.replicas}")
    found.append(f"trainer.world_size={allocation.ranks}")
    for name, stage in config.stages.items():
        if allocation.workers.get(name, stage.workers) != stage.workers:
            found.append(f"stages.{name}.workers={allocation.workers[name]}")
    if config.rollout.devices and config.trainer.devices:
        share = allocation.replicas * devices.replica
        last = share + allocation.ranks * devices.rank
        found.append(f"rollout.devices={json.dumps(list(range(share)), separators=(',', ':'))}")
        of_trainer = json.dumps(list(range(share, last)), separators=(",", ":"))
        found.append(f"trainer.devices={of_trainer}")
    return found


def _profile(run: str, work: Workload) -> Profile:
    folder = find_run(run)
    if not (folder / "summary.json").is_file():
        raise ConfigError(
            f"--profile {run}: the run has no summary.json, so it has not finished; wait for its "
            f"end, or take another"
        )
    config = _config_of(folder)
    overlaps, _ = work.overlaps(config.trainer.world_size)
    try:
        with _text(folder / "metrics.jsonl") as steps, _text(folder / "samples.jsonl") as samples:
            return read_profile(
                str(folder),
                config,
                steps=steps,
                samples=samples,
                summary=(folder / "summary.json").read_text(encoding="utf-8", errors="replace"),
                overlaps_export=overlaps,
            )
    except OSError as error:
        raise ConfigError(
            f"--profile {run}: {error.filename!r} cannot be read: {error.strerror}"
        ) from error


def _text(path: Path) -> TextIO:
    """A file that is read for its numbers: what is not text in it does no harm."""
    return open(path, encoding="utf-8", errors="replace")


def _config_of(folder: Path) -> RunConfig:
    return ConfigSource.from_file(folder / "config.yaml").build()


def _times(profiles: Sequence[Profile], file: str | None, work: Workload) -> Times:
    """What profiles show, with what the file says over it."""
    source = ConfigSource.from_values({}) if file is None else ConfigSource.from_file(file)
    if not profiles and file is None:
        raise ConfigError(
            "plan needs to know what work takes: give --profile RUN, a finished run, or --times "
            "FILE, times by hand"
        )
    under = measured(profiles) if profiles else {}
    stages = set(work.config.stages)
    if profiles:  # a policy's own tasks take no time worth planning
        under["stages"] = {name: own for name, own in under["stages"].items() if name in stages}
    by_hand = source.tree.get("lengths")
    if profiles and isinstance(by_hand, dict) and "mean" in by_hand:
        del under["lengths"]["groups"]
    tree = _over(under, source.tree)
    times, faults = source.validate(Times, tree)
    if times is None:
        raise ConfigError(faults)
    faults += [
        source.fault(
            ("stages", name), f"there is no such stage; they are {', '.join(sorted(stages))}"
        )
        for name in sorted(set(times.stages) - stages)
    ]
    faults += [
        f"stages.{name}: there are no times of this stage; give them with --times, as "
        f"{{stages: {{{name}: {{row_s: 0.01}}}}}}"
        for name in sorted(stages - set(times.stages))
    ]
    if faults:
        raise ConfigError(faults)
    return times


def _over(under: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Both trees as one; of what stands in both, the second."""
    found = dict(under)
    for key, value in over.items():
        below = found.get(key)
        if isinstance(below, dict) and isinstance(value, Mapping):
            found[key] = _over(below, value)
        else:
            found[key] = value
    return found


def _checked(
    profile: Profile, work: Workload, times: Times, registry: Registry, steps: int | None
) -> tuple[Profile, float | None]:
    """A run, and what a step of it takes when it is simulated; None if it cannot be planned."""
    try:
        source = ConfigSource.from_values(profile.config.model_dump(mode="json"))
        own = Workload.of(make_plan(source, registry))
    except ConfigError:
        return profile, None
    sample = Sample.of(own, times, steps=steps)
    done = simulate(own, own.allocation, times, sample.lengths, first=sample.first)
    return profile, done.step_s


def _assumed(
    work: Workload, times: Times, profiles: Sequence[Profile], devices: Devices, *, several: bool
) -> Assumed:
    """What the figures rest on that nobody measured."""
    found = []
    ranks = {profile.config.trainer.world_size for profile in profiles}
    trainer = times.trainer
    if several and len(ranks) < 2 and trainer.scaling == 1.0:
        found.append(
            "w trainer ranks are w times as fast: give profiles with different "
            "trainer.world_size, or trainer.scaling in --times"
        )
    if len(profiles) == 1 and not times.rollout.token_row_s:
        found.append(
            "a sequence is decoded as fast however many run beside it: the profile does not tell"
        )
    each = f"{devices.replica} device(s) a replica, {devices.rank} a trainer rank"
    found.append(f"{each}; memory is not looked at")
    return Assumed(tuple(found), work.left_out)


def _ranks(given: str | None, budget: int, work: Workload) -> list[int]:
    able: TrainerCapabilities = work.plan.chosen["trainer"].capabilities
    most = able.max_world_size or budget
    if given is not None:
        asked = _numbers("--trainer-ranks", given)
        if able.max_world_size is not None and asked[-1] > able.max_world_size:
            raise ConfigError(
                f"--trainer-ranks {given}: trainer plugin {work.config.trainer.plugin!r} runs on "
                f"at most {most} ranks"
            )
        return asked
    powers = [1 << bit for bit in range(budget.bit_length()) if 1 << bit <= min(most, budget - 1)]
    return sorted({*powers, work.config.trainer.world_size})


def _workers(given: Sequence[str], work: Workload) -> dict[str, list[int]]:
    found = {}
    for text in given:
        name, _, numbers = text.partition("=")
        if name not in work.config.stages:
            there = ", ".join(work.config.stages)
            raise ConfigError(f"--stage-workers {text!r}: the stages are {there}")
        found[name] = _numbers(f"--stage-workers {name}", numbers)
    return found


def _numbers(option: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{option} takes numbers from 1 on, as 1,2,4; got {text!r}")
    return sorted({int(part) for part in parts})


def _facts(
    found: Found, budget: int, best: list[str], times: Times, assumed: Assumed
) -> dict[str, Any]:
    def facts(candidate: Candidate) -> dict[str, Any]:
        done = asdict(candidate.simulated)
        del done["step_ends"]
        return {
            "replicas": candidate.allocation.replicas,
            "trainer_ranks": candidate.allocation.ranks,
            "stage_workers": dict(candidate.allocation.workers),
            "devices": candidate.devices,
            "lower_bound_s": candidate.bound_s,
            **done,
        }

    return {
        "devices": budget,
        "best": facts(found.best),
        "overrides": best,
        "present": None if found.present is None else facts(found.present),
        "simulated": [facts(candidate) for candidate in found.candidates],
        "allocations": found.allocations,
        "assumed": list(assumed.said),
        "not_simulated": list(assumed.left_out),
        "times": times.model_dump(mode="json", exclude={"lengths": {"groups"}}),
    }
