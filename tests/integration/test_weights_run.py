"""Whole runs over each transport: two ranks share the export, every version compared."""

import importlib

import pytest

from asyncflow_core import Flow
from asyncflow_core.errors import ConfigError

from .conftest import HERE
from .test_runs import lines

pytestmark = pytest.mark.multiproc


@pytest.fixture
def found_functions(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("plugin", "options"),
    [("host", {}), ("zmq", {"delta": True}), ("disk", {"source": "buckets"})],
)
def test_run_over_any_transport_every_version_is_bit_equal(
    settings, found_functions, plugin, options
):
    tree = settings(
        weight_sync={"plugin": plugin, "options": options, "verify_every": 1},
        trainer__world_size=2,
        trainer__options={"lr": 20.0, "sharded_export": True},
        rollout__replicas=2,
        rollout__options={"token_s": 0.005},
    )
    flow = Flow(**tree)
    list(flow.run())
    found = lines(flow.folder, "metrics.jsonl")
    assert found[-1]["weights/compared"] > 0
    assert found[-1]["weights/failures"] == 0
    assert found[-1]["rollout/tokens_lost"] == 0


def test_verify_without_what_it_needs_is_refused_before_the_start(settings):
    with pytest.raises(ConfigError, match="only buckets can be fetched again"):
        Flow(**settings(weight_sync={"plugin": "disk", "verify_every": 2}))


@pytest.mark.parametrize("plugin", ["host", "zmq"])
async def test_transport_that_holds_one_version_publishes_the_next_and_replicas_come_back(
    started, plugin
):
    run = started(
        weight_sync={"plugin": plugin, "options": {"versions": 1, "publish_timeout_s": 20}},
        rollout__replicas=2,
        rollout__options={"token_s": 0.01},
        workflow__steps=30,
    )
    await run.at_step(3)
    run.named("rollout-1").kill()
    summary = await run.finished()
    assert summary["restarts"] == {"rollout-1": 1}
