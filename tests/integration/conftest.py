"""Small runs: `settings` of one, and `started` for one in a process of its own."""

import importlib
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from asyncflow_core.flow.processes.run_dir import RunDirectory
from asyncflow_core.testing.aio import eventually

HERE = Path(__file__).parent
LIMIT_S = 5.0


@pytest.fixture
def settings(tmp_path):
    """A function from changes (dotted path to value) to the sections of a small run."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": c}) + "\n" for c in "abcdefghijkl"))

    def make(**changes):
        tree = {
            "name": "small",
            "out": str(tmp_path / "runs"),
            "tokenizer": {
                "plugin": "characters",
                "options": {"alphabet": "abcdefghijklmnopqrstuvwxyz"},
            },
            "prompts": {"plugin": "jsonl", "options": {"path": str(prompts)}},
            "rollout": {"plugin": "tabular", "options": {}, "sampling": {"max_new_tokens": 1}},
            "trainer": {"plugin": "tabular", "options": {"lr": 20.0}},
            "loss": {"plugin": "tabular_ppo_clip"},
            "stages": {
                "reward": {"function": "functions:next_letter", "kind": "reward"},
                "advantage": {
                    "function": "functions:centred",
                    "reads": ["reward", "response_ids"],
                    "writes": ["advantages"],
                    "whole_groups": True,
                },
            },
            "workflow": {"preset": "async", "steps": 4, "groups_per_step": 4, "group_size": 4},
            "weight_sync": {"plugin": "host"},
            "launcher": {"plugin": "local"},
        }
        for path, value in changes.items():
            *keys, last = path.split("__")
            node = tree
            for key in keys:
                node = node.setdefault(key, {})
            node[last] = value
        return tree

    return make


@pytest.fixture
def inline(settings, monkeypatch):
    """As `settings`, for a run inside this process; every engine may misbehave."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.syspath_prepend(str(HERE / "misbehave"))
    importlib.invalidate_caches()

    def make(**changes):
        return settings(
            **{"launcher__plugin": "inline", "weight_sync__plugin": "memory", **changes}
        )

    return make


class Started:
    """`asyncflow run` in a process and session of its own."""

    def __init__(self, tree, folder, prefix=()):
        self.folder = Path(tree["out"]) / tree["name"]
        self.mark = uuid.uuid4().hex
        self.config = config = folder / f"{self.mark}.yaml"
        config.write_text(json.dumps(tree))  # JSON is YAML
        self.output_path = folder / f"{self.mark}.out"
        path = [str(HERE), str(HERE / "misbehave"), os.environ.get("PYTHONPATH", "")]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "AFTEST": self.mark,
        }
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "asyncflow_core.cli", "run", str(config)],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=self.environment,
            )
        self.run_dirs = set()

    @property
    def output(self):
        return self.output_path.read_text()

    def processes(self):
        """Every process of the run that lives: its own, children, the guard, grandchildren."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("AFTEST") == self.mark:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def named(self, name):
        """The process of a service, None before it is there."""
        for process in self.processes():
            try:
                before, last = process.cmdline()[-2:]
                if before.endswith("guard.py"):
                    self.run_dirs.add(Path(last))
                if (before, last) == ("--spec", name) or before.endswith(f"{name}.py"):
                    return process
            except (psutil.Error, ValueError):
                continue
        return None

    def log(self, name):
        try:
            return (self.folder / "logs" / f"{name}.log").read_text()
        except FileNotFoundError:
            return ""

    def samples(self):
        """What was recorded, a mapping a row."""
        return [
            json.loads(line) for line in (self.folder / "samples.jsonl").read_text().splitlines()
        ]

    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())

    async def finished(self):
        """Wait for the end of a run that is to succeed; nothing was lost, nothing came twice."""
        await eventually(lambda: self.process.poll() is not None, timeout_s=90)
        assert self.process.returncode == 0, self.output
        workflow = json.loads(self.config.read_text())["workflow"]
        rows = workflow["groups_per_step"] * workflow["group_size"]
        trained = [row for row in self.samples() if row["batch"] is not None]
        assert len({row["key"] for row in trained}) == len(trained)
        for batch in range(workflow["steps"]):
            assert sum(row["batch"] == batch for row in trained) == rows, batch
        summary = self.summary()
        assert summary["rows_trained"] == rows * workflow["steps"] == summary["rows_put"]
        assert summary["max_staleness_trained"] <= summary["max_staleness_allowed"]
        return summary

    def steps(self):
        try:
            return len((self.folder / "metrics.jsonl").read_text().splitlines())
        except FileNotFoundError:
            return 0

    async def at_step(self, number=1):
        await eventually(
            lambda: self.steps() >= number or self.process.poll() is not None, timeout_s=30
        )
        assert self.process.poll() is None, self.output
        assert self.named("guard")

    async def with_process(self, *names):
        await eventually(lambda: all(map(self.named, [*names, "guard"])), timeout_s=30)

    async def without(self, name):
        """Wait for one process's own end."""
        await self.with_process(name)
        await eventually(lambda: self.named(name) is None, timeout_s=30)

    async def until(self, condition):
        try:
            await eventually(condition, timeout_s=30)
        except AssertionError as error:
            raise AssertionError(f"{error}; the run said:\n{self.output}") from error

    async def ended(self, what, *, status=None):
        """Wait for its end: seconds since now; nothing of it may be left."""
        start = time.monotonic()
        await eventually(lambda: self.process.poll() is not None, timeout_s=LIMIT_S)
        exit_s = time.monotonic() - start
        await eventually(lambda: not self.processes(), timeout_s=LIMIT_S)
        await eventually(lambda: not any(d.exists() for d in self.run_dirs), timeout_s=LIMIT_S)
        seconds = time.monotonic() - start
        sys.stdout.write(f"\n{what}: ended after {exit_s:.2f} s, all gone after {seconds:.2f} s\n")
        assert self.run_dirs
        assert seconds < LIMIT_S
        if status is not None:
            assert self.process.returncode == status, self.output
        return seconds

    def close(self):
        for process in self.processes():
            try:
                process.kill()
            except psutil.Error:
                continue
        self.process.wait()
        RunDirectory().remove()  # sweeps what a killed guard could not


@pytest.fixture
def started(settings, tmp_path):
    """A function that starts a run; whatever is left at the end is killed."""
    runs = []

    def start(**changes):
        changes.setdefault("name", f"run{len(runs)}")
        runs.append(Started(settings(**changes), tmp_path))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
