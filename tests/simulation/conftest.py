"""Plans of small workflows, made without an engine."""

from functools import cache
from pathlib import Path

from asyncflow_core.config_source import ConfigSource
from asyncflow_core.flow.planning.plan import make_plan
from asyncflow_core.flow.simulation.workload import Workload
from asyncflow_core.registry import Registry

REGISTRY = Registry()
PROMPTS = Path(__file__).parents[2] / "examples" / "next_letter" / "prompts.jsonl"


def score(response: str) -> float:
    """Any reward."""
    return float(len(response))


def shape(batch):
    """Any advantages."""
    return {"advantages": [tokens * 0.0 for tokens in batch["response_ids"]]}


def workload(preset="async", bound=None, **changes):
    """Four groups of two, a reward and whole-group advantages; `changes` by dotted path."""
    tree = {
        "tokenizer": {"plugin": "characters", "options": {"alphabet": "ab"}},
        "prompts": {"plugin": "jsonl", "options": {"path": str(PROMPTS)}},
        "rollout": {"plugin": "tabular", "rows_in_flight": 4},
        "trainer": {"plugin": "tabular", "micro_batch_tokens": 64},
        "loss": {"plugin": "tabular_ppo_clip"},
        "stages": {
            "reward": {"function": score, "kind": "reward", "rows": 2},
            "advantage": {
                "function": shape,
                "reads": ["reward", "response_ids"],
                "writes": ["advantages"],
                "whole_groups": True,
                "rows": 2,
            },
        },
        "workflow": {"preset": preset, "steps": 8, "groups_per_step": 4, "group_size": 2},
        "evaluation": None,
        "weight_sync": {"plugin": "host"},
    }
    if bound is not None:
        tree["workflow"]["max_staleness"] = bound
    source = ConfigSource.from_values(tree)
    for path, value in changes.items():
        source.override(path, value)
    return Workload.of(make_plan(source, REGISTRY))


@cache
def preset(name, bound=None, *, pacing=True):
    """A preset as it is, made once."""
    return workload(name, bound, **{"workflow.pacing": pacing})
