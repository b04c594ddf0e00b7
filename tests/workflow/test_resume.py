"""Runs killed with SIGKILL at random moments and at chosen places, and resumed until they are done.

What is looked at is what survives: files of the run and the last weights. Every prompt group is
trained exactly once in them, no step is doubled, and an exact sequential run ends with the very
bits of a run that nobody killed. `-s` shows where each kill struck.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from asyncflow_core import Flow
from asyncflow_core.config_source import ConfigSource

HERE = Path(__file__).parent
FUNCTIONS = HERE.parent / "integration"
KILLS = int(os.environ.get("ASYNCFLOW_RESUME_KILLS", "13"))
"""Random kills of each of the four kinds of run."""
STEPS, GROUPS, SAMPLES = 12, 4, 4

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]

KINDS = {
    "sequential-memory-exact": ("sequential", "memory", "exact"),
    "sequential-zmq-exact": ("sequential", "zmq", "exact"),
    "async-zmq-reuse": ("async", "zmq", "reuse"),
    "async-memory-reuse": ("async", "memory", "reuse"),
}


def tree(folder, name, kind, launcher="inline", **changes):
    """The configuration of a small run whose responses have different lengths."""
    preset, store, resume = KINDS[kind]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": c}) + "\n" for c in "abcdefghijkl"))
    durable = {"durability": "journal", "shards": 1} if store == "zmq" else {}
    made = {
        "name": name,
        "out": str(folder / "runs"),
        "tokenizer": {
            "plugin": "characters",
            "options": {"alphabet": "abcdefghijklmnopqrstuvwxyz"},
        },
        "prompts": {
            "plugin": "jsonl",
            "options": {"path": str(prompts), "evaluation_share": 0.2},
        },
        "rollout": {
            "plugin": "tabular",
            "options": {"token_s": 0.003, "slots": 8, "eos_token_id": 4},
            "sampling": {"max_new_tokens": 6},
            "rows_in_flight": 24,
        },
        "trainer": {"plugin": "tabular", "options": {"lr": 5.0, "optimizer": "adam"}},
        "loss": {"plugin": "tabular_ppo_clip"},
        "stages": {
            "reward": {"function": "functions:shorter", "kind": "reward"},
            "advantage": {
                "function": "functions:centred",
                "reads": ["reward", "response_ids"],
                "writes": ["advantages"],
                "whole_groups": True,
            },
        },
        "workflow": {
            "preset": preset,
            "max_staleness": 0 if preset == "sequential" else 2,
            "steps": STEPS,
            "groups_per_step": GROUPS,
            "group_size": SAMPLES,
        },
        "evaluation": {"samples": 1},
        "checkpoint": {"every": 2, "resume": resume},
        "data_store": {"plugin": store, "options": durable},
        "weight_sync": {"plugin": "memory" if launcher == "inline" else "host"},
        "launcher": {"plugin": launcher},
    }
    return made | changes


class Killed:
    """A run that is killed again and again; `kills` says where."""

    def __init__(self, folder, config):
        self.config = folder / f"{config['name']}.yaml"
        self.config.write_text(json.dumps(config))
        self.folder = Path(config["out"]) / config["name"]
        self.kills = []

    def life(self, place):
        """One life, killed at a place (see `killed_run.py`) or not; whether it left work undone."""
        resumed = (self.folder / "checkpoints").is_dir() and any(
            path.name.isdigit() for path in (self.folder / "checkpoints").iterdir()
        )
        start = time.monotonic()
        path = [str(FUNCTIONS), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [
                *(sys.executable, str(HERE / "killed_run.py")),
                *("-" if resumed else str(self.config), str(self.folder), place),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            capture_output=True,
            text=True,
            timeout=120,
        )
        killed = done.returncode == -9
        assert killed or done.returncode == 0, done.stderr
        if killed:
            seconds = time.monotonic() - start
            self.kills.append(f"{place:>18}  step {self.steps():>2}  {seconds:.1f} s")
        # With its summary a run is done, though it was still ending its processes; resuming it is
        # refused (tests/integration/test_resume.py).
        return killed and not (self.folder / "summary.json").exists()

    def steps(self):
        path = self.folder / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def say(self):
        text = "".join(f"  {line}\n" for line in self.kills)
        sys.stdout.write(f"\n{self.folder.name}: {len(self.kills)} kills\n{text}")


def lines(folder, name):
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def weights(folder, version=STEPS):
    path = Path(folder) / "checkpoints" / str(version) / "trainer"
    return {file.name: np.load(file) for file in sorted(path.glob("*.npy"))}


def assert_sound(folder):
    """Nothing is lost and nothing doubled in what survives."""
    metrics = lines(folder, "metrics.jsonl")
    assert [m["version"] for m in metrics] == list(range(1, STEPS + 1))
    lives = [m["life"] for m in metrics]
    assert lives == sorted(lives)
    samples = [s for s in lines(folder, "samples.jsonl") if s["batch"] is not None]
    keys = [s["key"] for s in samples]
    assert len(set(keys)) == len(keys)
    bound = 2
    for step in metrics:
        batch = [s for s in samples if s["batch"] == step["version"] - 1]
        groups = {tuple(s["key"].split("/")[:3]) for s in batch}
        assert (len(batch), len(groups)) == (GROUPS * SAMPLES, GROUPS)
        assert step["reward/mean"] == pytest.approx(np.mean([s["reward"] for s in batch]))
        for sample in batch:
            assert 0 <= sample["batch"] - min(v for v, _ in sample["versions"]) <= bound
    # Batches are those of a run that nobody killed: the i-th prompt belongs to batch i // groups.
    places = sorted({(s["batch"], *map(int, s["key"].split("/")[1:3])) for s in samples})
    in_order = sorted(place[1:] for place in places)
    assert [place[1:] for place in places] == in_order
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rows_trained"] == summary["rows_put"] == STEPS * GROUPS * SAMPLES
    assert summary["steps"] == STEPS
    held_out = [s for s in lines(folder, "samples.jsonl") if s["batch"] is None]
    assert len(held_out) == summary["rows_evaluated"]
    assert summary["eval_before"] is not None
    assert summary["eval_after"] is not None


def assert_same_weights(folder, straight):
    found, wanted = weights(folder), weights(straight)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert (found[name] == wanted[name]).all(), name


@pytest.fixture
def straight(tmp_path, monkeypatch):
    """A function: the folder of a run of a kind that nobody killed."""
    monkeypatch.syspath_prepend(str(FUNCTIONS))

    def run(kind):
        flow = Flow(**tree(tmp_path, "straight", kind))
        list(flow.run())
        return flow.folder

    return run


def moment(rng):
    """Any time after the start, or after some step."""
    if rng.random() < 0.3:
        return f"{rng.uniform(0.0, 2.0):.3f}"
    return f"stepped:{rng.randint(1, 4)}+{rng.uniform(0.001, 0.15):.3f}"


@pytest.mark.parametrize("kind", KINDS)
def test_run_killed_at_random_moments_is_resumed_until_it_is_done(tmp_path, straight, kind):
    rng = random.Random(kind)
    wanted = straight(kind) if kind.startswith("sequential") else None
    kills = number = 0
    while kills < KILLS:
        run = Killed(tmp_path, tree(tmp_path, f"{kind}-{number}", kind))
        while run.life(moment(rng)):
            pass
        run.say()
        assert_sound(run.folder)
        if wanted is not None:
            assert_same_weights(run.folder, wanted)
        kills, number = kills + len(run.kills), number + 1


PLACES = {
    "checkpoints": (
        *("made:1", "made:2", "saved:2", "recorded:2", "rename:1", "rename:2", "pruning:3"),
        *("pruned:2", "finished:2"),
    ),
    "resumes": (
        *("finished:2", "life:1", "verified:1", "counted:1", "cutting:1", "cutting:2"),
        *("cutting:3", "cutting:4", "cut:1", "cut:2", "cut:3", "cut:4", "restoring:1"),
        *("restored:1", "loaded:1"),
    ),
    "steps": (
        *("finished:1", "noted:1", "noted:2", "stepped:1", "stepped:2", "stepped:3"),
        *("acknowledging:1", "acknowledging:2"),
    ),
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_run_killed_at_chosen_places_is_resumed_until_it_is_done(tmp_path, straight, kind, where):
    run = Killed(tmp_path, tree(tmp_path, kind, kind))
    for place in PLACES[where]:
        if not run.life(place):  # it was done before it came to the place
            run.say()
            assert_sound(run.folder)
            run = Killed(tmp_path, tree(tmp_path, f"{kind}-{place.replace(':', '-')}", kind))
            run.life("finished:2")
    assert not run.life("-")
    run.say()
    assert_sound(run.folder)
    if kind.startswith("sequential"):
        assert_same_weights(run.folder, straight(kind))


@pytest.mark.parametrize("kind", ["sequential-memory-exact", "async-zmq-reuse"])
def test_run_of_processes_killed_is_resumed_until_it_is_done(tmp_path, straight, kind):
    """Two replicas, two trainer ranks, a process for each stage: all of them die with the run."""
    pytest.importorskip("asyncflow_weights_host")
    config = tree(tmp_path, kind, kind, launcher="local")
    config["rollout"] |= {"replicas": 2, "rows_in_flight": 8}
    config["trainer"] |= {"world_size": 2}
    run = Killed(tmp_path, config)
    rng = random.Random(kind)
    for place in ("finished:1", "saved:2", "rename:1", "loaded:1", "finished:2"):
        if not run.life(f"{place}+{rng.uniform(0.001, 0.2):.3f}"):
            break
    else:
        assert not run.life("-")
    run.say()
    assert_sound(run.folder)


DEMO = HERE.parents[1] / "examples" / "spell_backward"


def test_demo_killed_and_resumed_exactly_ends_with_the_bits_of_a_straight_run(tmp_path):
    """The real engines: transformers generates, hzp trains."""
    safetensors = pytest.importorskip("safetensors.numpy")
    pytest.importorskip("asyncflow_hzp")
    if not (DEMO / "base").is_dir():
        pytest.skip("python examples/spell_backward/prepare.py makes its model")

    def config(name):
        tree = ConfigSource.from_file(DEMO / "config.yaml").tree
        for section in ("workflow", "trainer"):
            tree[section] = dict(tree[section])
        tree["workflow"] |= {"preset": "sequential", "steps": 4, "groups_per_step": 16}
        del tree["workflow"]["max_staleness"]
        checkpoint = {"every": 1, "keep": 9, "resume": "exact"}
        model = str(DEMO / "base")
        more = {"name": name, "out": str(tmp_path / "runs"), "model": model, "evaluation": None}
        return tree | more | {"checkpoint": checkpoint}

    straight, broken = (Killed(tmp_path, config(name)) for name in ("straight", "broken"))
    assert not straight.life("-")
    for place in ("finished:2", "loaded:1", "saved:1"):
        assert broken.life(place)
    assert not broken.life("-")
    broken.say()
    lives = [m["life"] for m in lines(broken.folder, "metrics.jsonl")]
    assert lives == [0, 0, 3, 3]
    for part in ("model", "optimizer"):
        found, wanted = (
            {
                name: values
                for file in (run.folder / "checkpoints/4/trainer" / part).glob("*.safetensors")
                for name, values in safetensors.load_file(file).items()
            }
            for run in (broken, straight)
        )
        assert found.keys() == wanted.keys()
        assert wanted
        for name in wanted:
            assert (found[name] == wanted[name]).all(), name
