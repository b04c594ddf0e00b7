"""Core alone, as pip installs it."""

import json
import os
import statistics
import subprocess
import sys
import venv

import pytest

from .conftest import ROOT

HEAVY = (
    *("torch", "transformers", "ray", "sglang", "vllm", "megatron", "jax", "tensorflow"),
    *("datasets", "safetensors", "reasoning_gym", "wandb"),
)

WALK = f"""
import importlib, json, pkgutil, sys
import asyncflow_core
first = sorted(m for m in sys.modules if m.split(".")[0] not in sys.stdlib_module_names)
names = [m.name for m in pkgutil.walk_packages(asyncflow_core.__path__, "asyncflow_core.")]
for name in names:
    if name.endswith("__main__"):
        continue
    if name.startswith("asyncflow_core.testing"):
        continue  # needs the extra `testing`
    importlib.import_module(name)
from asyncflow_core.registry import Registry
registry = Registry()
for entry in registry.entries():
    if entry.distribution == "asyncflow-core":
        registry.get(entry.kind, entry.name)
heavy = [m for m in sys.modules if m.split(".")[0] in {HEAVY!r}]
ours = {{m.split(".")[0] for m in sys.modules if m.startswith("asyncflow_")}}
plugins = sorted(ours - {{"asyncflow_core"}})
print(json.dumps({{
    "file": asyncflow_core.__file__, "first": first, "names": names, "heavy": heavy,
    "plugins": plugins, "entries": [e.label for e in registry.entries()],
}}))
"""


def run(*command, **more):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """An environment outside the tree that holds the wheel and what it declares."""
    top = tmp_path_factory.mktemp("alone")
    options = ("--quiet", "--disable-pip-version-check")
    pip = (sys.executable, "-m", "pip")
    build = ("wheel", *options, "--no-deps", "--no-build-isolation", "--wheel-dir", str(top))
    run(*pip, *build, str(ROOT))
    (wheel,) = top.glob("asyncflow_core-*.whl")
    venv.create(top / "env", with_pip=False)
    python = top / "env" / "bin" / "python"
    run(*pip, "--python", str(python), "install", *options, str(wheel))
    return python


@pytest.mark.slow
@pytest.mark.multiproc
def test_wheel_alone_imports_every_module_and_nothing_heavy(alone, tmp_path):
    clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    found = json.loads(run(alone, "-c", WALK, cwd=tmp_path, env=clean))
    assert found["file"].startswith(str(alone.parents[1]))
    assert "asyncflow_core.flow.flow" in found["names"]
    assert found["heavy"] == found["plugins"] == []
    assert "trainer.tabular" in found["entries"]
    # Importing the package loads the package, nothing else.
    assert [m for m in found["first"] if m != "__main__"] == ["asyncflow_core"]


@pytest.mark.slow
@pytest.mark.multiproc
def test_wheel_alone_has_the_command(alone, tmp_path):
    command = alone.with_name("asyncflow")
    clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    assert run(command, "--version", cwd=tmp_path, env=clean).startswith("asyncflow, version ")
    assert "asyncflow-core" in run(command, "plugins", cwd=tmp_path, env=clean)


@pytest.mark.slow
@pytest.mark.multiproc
def test_wheel_alone_has_the_templates_of_plugins(alone, tmp_path):
    clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    run(alone.with_name("asyncflow"), "new-plugin", "stage", "mine", cwd=tmp_path, env=clean)
    assert (tmp_path / "asyncflow-stage-mine" / "tests" / "test_stage_mine.py").is_file()


@pytest.mark.slow
@pytest.mark.multiproc
def test_import_costs_little_more_than_numpy(alone):
    """At most 1.3 times the time of `import numpy`, measured in turns; the medians of 15."""
    ratios = []
    for _ in range(3):
        times = {"numpy": [], "asyncflow_core": []}
        for _ in range(15):
            for name, found in times.items():
                code = (
                    "import time; t = time.perf_counter(); "
                    f"import {name}; print(time.perf_counter() - t)"
                )
                found.append(float(run(alone, "-c", code)))
        medians = {name: statistics.median(found) for name, found in times.items()}
        ratios.append(medians["asyncflow_core"] / medians["numpy"])
        if ratios[-1] <= 1.3:
            return
    pytest.fail(f"import asyncflow_core takes {ratios} times as long as import numpy")


def test_core_in_a_fresh_process_imports_nothing_heavy():
    """The same in the environment at hand, where engines may be installed: every default run."""
    found = json.loads(run(sys.executable, "-c", WALK))
    assert found["heavy"] == found["plugins"] == []
    assert not {"numpy", "pydantic", "zmq", "click"} & set(found["first"])
