"""`asyncflow doctor`: everything a run would refuse, at once, without starting anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from asyncflow_core.config_source import ConfigSource, parse_overrides
from asyncflow_core.errors import ConfigError
from asyncflow_core.flow.planning.plan import Plan, make_plan
from asyncflow_core.registry import Registry
from asyncflow_core.services.rollout import RolloutCapabilities

__all__ = ["examine"]


def examine(config: str, overrides: Sequence[str], *, as_json: bool) -> int:
    """Print the report; returns the exit status, 0 without faults, else 2."""
    try:
        source = ConfigSource.from_file(config)
        for path, value in parse_overrides(overrides).items():
            source.override(path, value)
        plan = make_plan(source, Registry())
    except ConfigError as error:
        _print_faults(error.faults, as_json=as_json)
        return 2
    if as_json:
        found = {"ok": True, "faults": [], **_facts(plan), "notes": _notes(plan)}
        print(json.dumps(found, indent=2))
    else:
        _print_plan(plan)
    return 0


def _print_faults(faults: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"ok": False, "faults": list(faults)}, indent=2))
        return
    print(f"{len(faults)} fault(s):")
    for fault in faults:
        print(f"  {fault}")


def _facts(plan: Plan) -> dict[str, Any]:
    flow = plan.config.workflow
    return {
        "plugins": {
            name: {"plugin": chosen.plugin.name, "distribution": chosen.plugin.distribution}
            for name, chosen in plan.chosen.items()
        },
        "tasks": {
            name: {"reads": list(task.columns), "writes": list(task.spec.writes)}
            for name, task in plan.tasks.items()
        },
        "workflow": {
            "preset": flow.preset,
            "max_staleness": flow.bound,
            "steps": flow.steps,
            "rows_per_step": flow.groups_per_step * flow.group_size,
            "switch_mode": plan.switch_mode.value,
        },
    }


def _notes(plan: Plan) -> list[str]:
    """What is right and may surprise."""
    flow, notes = plan.config.workflow, []
    able: RolloutCapabilities = plan.chosen["rollout"].capabilities
    if able.max_tokens is not None:
        new = plan.config.rollout.sampling.max_new_tokens
        notes.append(
            f"prompts may have {able.max_tokens - new} tokens: rollout takes {able.max_tokens}, of "
            f"which max_new_tokens are {new}; longer prompts are dropped"
        )
    if flow.bound == 0 and flow.updates_per_step > 1:
        notes.append(
            f"only the first of a step's {flow.updates_per_step} updates is on-policy to the "
            f"token; the others train rows that are that many updates old"
        )
    if flow.preset == "sequential":
        turns = [name for name, task in plan.tasks.items() if task.spec.batch_groups]
        notes.append(f"one stage at a time works on a batch: rollout, {', '.join(turns)}")
    if "proximal" in plan.tasks:
        notes.append(
            f"the loss {plan.config.loss.plugin!r} reads proximal_logprobs: the trainer computes "
            f"them with a step's first weights, so its first update waits for the whole batch"
        )
    return notes


def _print_plan(plan: Plan) -> None:
    facts = _facts(plan)
    print("plugins:")
    for name, found in facts["plugins"].items():
        print(f"  {name:<16} {found['plugin']:<16} {found['distribution']}")
    print("dataflow:")
    for name, task in facts["tasks"].items():
        print(f"  {name:<16} {', '.join(task['reads'])} -> {', '.join(task['writes']) or '(end)'}")
    flow = facts["workflow"]
    print(
        f"workflow: {flow['preset']}, max staleness {flow['max_staleness']}, {flow['steps']} steps "
        f"of {flow['rows_per_step']} rows, weights switch by {flow['switch_mode']}"
    )
    for note in _notes(plan):
        print(f"note: {note}")
    print("no faults")
