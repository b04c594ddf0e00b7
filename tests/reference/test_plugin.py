import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from asyncflow_core.parts import PartContext
from asyncflow_core.reference.data_store import InProcessDataStore
from asyncflow_core.services.base import Service

ROOT = Path(__file__).parents[2]
POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
OURS = [
    name
    for name, module in POINTS["asyncflow"].items()
    if module == "asyncflow_core.reference.plugin"
]


@pytest.mark.parametrize("label", OURS)
def test_entry_point_is_registered_with_documented_options(registry, label):
    plugin = registry.get(*label.split("."))
    for name, field in plugin.options.model_fields.items():
        assert field.description, f"{label}: option {name} has no docstring"
    assert plugin.options.model_config["extra"] == "forbid"
    assert plugin.options.model_config["frozen"]


@pytest.mark.parametrize("label", ["rollout.tabular", "trainer.tabular", "weight_sync.memory"])
def test_factory_builds_a_closed_service(registry, label):
    plugin = registry.get(*label.split("."))
    options = {} if label.startswith("weight") else {"vocab_size": 4}
    ctx = PartContext(registry=registry)
    assert isinstance(plugin.factory(plugin.parse_options(options), ctx), Service)
    assert plugin.capabilities is not None


def test_data_store_gets_its_options(registry):
    plugin = registry.get("data_store", "memory")
    store = plugin.factory(plugin.parse_options({"capacity_rows": 3}), PartContext())
    assert isinstance(store, InProcessDataStore)


def test_import_takes_no_engine_and_no_store():
    code = (
        "import sys, asyncflow_core.reference.plugin as p; "
        "print([m for m in ('torch', 'asyncflow_core.ledger', 'hypothesis') if m in sys.modules])"
    )
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"
