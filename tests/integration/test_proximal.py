"""`proximal_logprobs`: of a step's first weights, computed by the trainer where a loss asks."""

import json
import types

import numpy as np
import pytest

from asyncflow_core import Flow
from asyncflow_core.errors import ConfigError
from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.reference.losses import TabularPPOClipOptions, tabular_ppo_clip
from asyncflow_core.registry import Registry
from asyncflow_core.services.trainer import LossCapabilities

pytestmark = pytest.mark.multiproc

READS = ("behaviour_logprobs", "advantages", "proximal_logprobs")


def module_of(loss):
    """A plugin module that offers it as `decoupled`."""

    @hookimpl
    def asyncflow_register(registrar):
        registrar.add(
            "loss",
            "decoupled",
            lambda options, ctx: loss,
            api_version=1,
            options=TabularPPOClipOptions,
            capabilities=LossCapabilities("numpy", READS),
        )

    module = types.ModuleType("decoupled")
    module.asyncflow_register = asyncflow_register
    return module


@pytest.fixture
def calls():
    """(current, proximal) log-probs of each loss call, in order; proximal None without a column."""
    return []


@pytest.fixture
def run(inline, calls):
    def loss(logprobs, columns, config):
        calls.append((np.array(logprobs), columns.get("proximal_logprobs")))
        return tabular_ppo_clip(logprobs, columns, config)

    def start(**changes):
        registry = Registry()
        registry.add(module_of(loss))
        flow = Flow(registry=registry, **inline(loss={"plugin": "decoupled"}, **changes))
        list(flow.run())
        lines = (flow.folder / "metrics.jsonl").read_text().splitlines()
        return flow, [json.loads(line) for line in lines]

    return start


@pytest.mark.parametrize("preset", ["sequential", "async"])
def test_several_updates_get_those_of_the_steps_first_weights(run, calls, preset, tmp_path):
    one_context = tmp_path / "one.jsonl"  # so that an update moves the log-probs of every row
    one_context.write_text('{"prompt": "a"}\n' * 4)
    flow, steps = run(
        prompts__options={"path": str(one_context)},
        evaluation=None,
        workflow__preset=preset,
        workflow__updates_per_step=2,
        workflow__group_size=8,
        trainer__micro_batch_tokens=10_000,
        stages__reward__function="functions:low_letter",
    )
    assert flow.summary.steps == len(steps) == 4
    assert all(step["trainer/grad_norm"] > 0 for step in steps)
    first, second = [], []
    for current, proximal in calls:
        assert proximal is not None
        # Of the weights before the first update: equal at it, and not after it.
        (first if np.allclose(current, proximal, atol=1e-6) else second).append(current)
    assert first, "the first update's rows"
    assert second, "the second update trains rows whose weights have moved"


def test_one_update_needs_no_column(run, calls):
    flow, _ = run(workflow__updates_per_step=1)
    assert "proximal" not in flow.plan.tasks
    assert calls
    assert all(proximal is None for _, proximal in calls)


def test_a_stage_of_the_users_may_write_them(run, calls):
    flow, _ = run(
        workflow__updates_per_step=2,
        stages__proximal_by_hand={
            "function": lambda batch: {
                "proximal_logprobs": [np.full(n, -7.0) for n in batch["response_ids"].lengths]
            },
            "reads": ["response_ids"],
            "writes": ["proximal_logprobs"],
        },
    )
    assert "proximal" not in flow.plan.tasks
    assert all((proximal == -7.0).all() for _, proximal in calls)


def test_stage_named_like_the_task_is_refused(inline):
    with pytest.raises(ConfigError, match="taken by the flow's own tasks"):
        Flow(
            **inline(
                stages__proximal={
                    "function": "functions:centred",
                    "reads": ["reward"],
                    "writes": ["x"],
                }
            )
        )
