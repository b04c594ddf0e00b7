"""What plugins and functions of strangers do when they are built or called, in words."""

import asyncio
import json
from functools import partial

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column
from asyncflow_core.config import StageConfig
from asyncflow_core.errors import ConfigError, DataError, ServiceError
from asyncflow_core.flow.building import build
from asyncflow_core.flow.planning.stages import make_stage
from asyncflow_core.parts import PartContext, row_scorer
from asyncflow_core.registry import Plugin

CONTEXT = PartContext(name="x")


def plugin(factory):
    return Plugin("stage", "theirs", factory, distribution="their-dist")


def raising(error):
    def factory(options, ctx):
        raise error

    return factory


@pytest.mark.parametrize(
    ("error", "said"),
    [(RuntimeError("no file"), "RuntimeError: no file"), (KeyError(), "KeyError")],
)
def test_factory_that_raises_is_named(error, said):
    with pytest.raises(ServiceError, match=f"^stage.theirs of their-dist cannot be built: {said}$"):
        build(plugin(raising(error)), None, CONTEXT)


def test_factory_that_raises_one_of_our_errors_is_left_alone():
    with pytest.raises(DataError, match=r"^mine$"):
        build(plugin(raising(DataError("mine"))), None, CONTEXT)


def test_factory_that_returns_no_service_is_named():
    theirs = Plugin("rollout", "theirs", lambda options, ctx: None, distribution="their-dist")
    said = r"^rollout\.theirs of their-dist cannot be built: its factory returned None, which is "
    with pytest.raises(
        ServiceError, match=said + r"no asyncflow_core\.Rollout; let it return one$"
    ):
        build(theirs, None, CONTEXT)


def test_stage_that_cannot_be_called_is_refused():
    stage = StageConfig(plugin="theirs")
    with pytest.raises(ConfigError, match=r"stage\.theirs of their-dist makes a int; a stage is"):
        make_stage(stage, plugin(lambda options, ctx: 7), None, CONTEXT)


def cancelled(x):
    async def call():
        raise asyncio.CancelledError

    asyncio.run(call())


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (lambda x: None, "TypeError: the score is None, not a number"),
        (lambda x: "good", "TypeError: the score is 'good', not a number"),
        (lambda x: [1, 2], r"TypeError: the score is [1, 2], not a number"),
        (lambda x: float("nan"), "ValueError: the score is nan, not a finite number of 32 bits"),
        (lambda x: 1e39, "ValueError: the score is 1e+39, not a finite number of 32 bits"),
        (cancelled, "CancelledError: "),
    ],
)
def test_reward_of_one_row_that_fails_counts_0_and_says_why(score, said):
    stage = row_scorer(lambda x: score(x) if x else 0.5, ("x",), None)
    found = stage(Batch({"x": Column.objects([0, 1])}))
    assert found["reward"].tolist() == [0.5, 0.0]
    assert found["reward"].dtype == np.float32
    none, why = found["reward_error"]
    assert none is None
    assert why.startswith(said)


def test_reward_that_raises_is_told_by_the_line_of_its_own_code():
    def score(x):
        return json.loads(x)["score"]

    line = score.__code__.co_firstlineno + 1
    first, second = row_scorer(score, ("x",), None)(Batch({"x": Column.objects(["{", "{}"])}))[
        "reward_error"
    ]
    assert first.startswith("JSONDecodeError: ")  # in the library, which is not shown
    assert first.endswith(f" (test_building.py:{line})")
    assert second == f"KeyError: 'score' (test_building.py:{line})"
    (why,) = row_scorer(partial(score), ("x",), None)(Batch({"x": Column.objects(["{}"])}))[
        "reward_error"
    ]
    assert why == "KeyError: 'score'"
