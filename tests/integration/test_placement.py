"""Devices and interpreters of services."""

import json
import sys

import psutil
import pytest

import asyncflow_core as af
from asyncflow_core.errors import ConfigError

pytestmark = pytest.mark.multiproc


async def test_services_see_their_devices_and_ranks_their_number(started):
    run = started(
        workflow__steps=10_000,
        rollout__devices=[0, 1, 2, 3],
        rollout__replicas=2,
        trainer__devices=[4, 5],
        trainer__world_size=2,
    )
    await run.at_step()
    seen = {
        name: run.named(name).environ()
        for name in ("rollout-0", "rollout-1", "trainer-1", "reward-0")
    }
    assert seen["rollout-0"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert seen["rollout-1"]["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert seen["trainer-1"]["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert "CUDA_VISIBLE_DEVICES" not in seen["reward-0"]
    assert {key: seen["trainer-1"][key] for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE")} == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rollout__devices": [0, 1], "trainer__devices": [1, 2]},
            r"devices \[1\] are given to rollout and trainer",
        ),
        (
            {"rollout__devices": [0, 1, 2], "rollout__replicas": 2},
            "3 devices do not divide among 2 replicas",
        ),
        ({"rollout__devices": [0, 0]}, "names a device twice"),
        ({"trainer__python": "/no/such/python"}, "there is no interpreter at '/no/such/python'"),
        ({"trainer__python": "/tmp"}, "there is no interpreter at '/tmp'"),
    ],
)
def test_impossible_placement_is_a_fault_of_the_plan(settings, monkeypatch, changes, words):
    monkeypatch.syspath_prepend(str(__file__.rpartition("/")[0]))
    with pytest.raises(ConfigError, match=words):
        af.Flow(**settings(**changes))


def test_placement_without_processes_is_refused(inline):
    with pytest.raises(ConfigError, match="starts no processes, so devices has no effect"):
        af.Flow(**inline(rollout__devices=[0]))


async def test_service_runs_on_its_own_interpreter(started, tmp_path):
    recorded = tmp_path / "argv"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" > {recorded}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    run = started(workflow__steps=10_000, rollout__python="python")
    await run.at_step()
    assert recorded.read_text() == "-m asyncflow_core.cli serve --spec rollout-0\n"
    assert isinstance(run.named("rollout-0"), psutil.Process)
    written = (run.folder / "config.yaml").read_text()
    assert f"python: {python}" in written
    assert json.dumps(sys.executable).strip('"') in written
