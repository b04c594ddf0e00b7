"""The examples that the guides show do what the guides say."""

import importlib
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from asyncflow_core import Flow
from asyncflow_core.config import ModelConfig, StageConfig
from asyncflow_core.registry import PluginEntry, Registry

ROOT = Path(__file__).parents[2]
ECHO = ROOT / "examples" / "plugin_echo"


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(ECHO / "src"))
try:
    _echo = load(ECHO / "tests" / "test_echo.py", "echo_tests")
finally:
    sys.path.remove(str(ECHO / "src"))

TestEcho = _echo.TestEcho
test_brevity_longer_response_scores_less = _echo.test_brevity_longer_response_scores_less


def test_echo_entry_points_register_what_they_name():
    project = tomllib.loads((ECHO / "pyproject.toml").read_text("utf-8"))["project"]
    entries = [
        PluginEntry(*label.split("."), module, project["name"], project["version"])
        for label, module in project["entry-points"]["asyncflow"].items()
    ]
    registry = Registry(entries)
    assert [registry.get(e.kind, e.name).label for e in entries] == [
        "rollout.echo",
        "stage.brevity",
    ]


def test_quickstart_in_python_runs(tmp_path):
    example = load(ROOT / "examples" / "next_letter" / "in_python.py", "in_python")
    flow = example.make_flow(max_staleness=1, steps=2, out=str(tmp_path))
    assert [step.version for step in flow.run()] == [1, 2]
    assert flow.summary.max_staleness_trained <= 1


async def test_quickstart_own_loop_learns():
    example = load(ROOT / "examples" / "next_letter" / "own_loop.py", "own_loop")
    rewards = await example.train(40)
    assert rewards[-1] > 4 * rewards[0]


@pytest.fixture
def importable_examples(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


def test_stages_of_the_guide_make_a_sound_run(importable_examples):
    page = (ROOT / "docs" / "guides" / "rewards-and-stages.md").read_text("utf-8")
    blocks = [YAML(typ="safe").load(b) for b in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    with_models = [block for block in blocks if "models" in block]
    for block in with_models:  # of engines and checkpoints that are not here
        for model in block["models"].values():
            ModelConfig.model_validate(model)
        for stage in block["stages"].values():
            assert StageConfig.model_validate(stage).model in block["models"]
    assert with_models
    stages = {
        name: stage
        for block in blocks
        if "models" not in block
        for name, stage in block["stages"].items()
    }
    assert sorted(stages) == ["advantage", "reward"]
    config = ROOT / "examples" / "next_letter" / "config.yaml"
    plan = Flow.from_config(config, {"stages": stages}).plan
    assert plan.tasks["advantage"].spec.writes == ("advantages",)


def test_stage_of_the_guide_equals_grpo_without_deviation(importable_examples):
    import numpy as np

    from asyncflow_core.batch import Batch, Column

    stages = importlib.import_module("examples.next_letter.stages")
    columns = {
        "key": Column.dense(np.array([[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]])),
        "reward": Column.dense([1.0, 0.0, 1.0], np.float32),
        "response_ids": Column.ragged([[1], [2, 3], [4]], np.int32),
    }
    advantages = stages.centred(Batch(columns))["advantages"]
    assert [a.tolist() for a in advantages] == [[0.5], [-0.5, -0.5], [0.0]]
