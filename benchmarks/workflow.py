"""The workflow's presets over engines that emulate service times: overlap, staleness, switches.

    make bench BENCH=workflow        (about 25 minutes)

Real processes, the zmq store, and weight sync of 1 GB of real weights at every version; the engines
sleep for the time of their work (`benchmarks/emulated`), so that two cores show what a cluster
would. Pure work a step: trainer 1.00, rollout 0.93 (16 slots on 2 replicas), reference 0.55, reward
0.35, advantage 0.20; 64 samples in groups of 8, lengths lognormal with sigma 1.0, the longest 0.8.
Measured from step 10 on. Prints a table, and last a JSON line. `ideal` is what the same batches
would take if nothing cost time but the work itself (`benchmarks/emulated/ideal.py`; async: the
trainer's work).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EMULATED = ROOT / "benchmarks" / "emulated"
sys.path.insert(0, str(EMULATED))

from asyncflow_emulated import GROUPS, SAMPLES, Loads  # noqa: E402
from ideal import sequential, streaming  # noqa: E402

FIRST = 10
"""Steps before this one are the start of the pipeline."""

Line = tuple[str, float, float, int]


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        step_s: wall seconds a step, over the measured ones.
        waiting: share of the wall that the trainer waited for rows.
        exposed: share of the time of replicas and trainer lost to switches.
        summary: of the run.
    """

    step_s: float
    waiting: float
    exposed: float
    summary: dict[str, Any]


def config(folder: Path, preset: str, bound: int, steps: int, store: str) -> dict[str, Any]:
    """The run, as its file holds it."""
    prompts = folder / "prompts.jsonl"
    lines = [json.dumps({"prompt": "a"})] * ((steps + bound + 2) * GROUPS)
    prompts.write_text("\n".join(lines) + "\n")
    workflow = {"preset": preset, "steps": steps, "groups_per_step": GROUPS, "group_size": SAMPLES}
    if preset == "async":
        workflow["max_staleness"] = bound
    return {
        "name": "emulated",
        "out": str(folder / "runs"),
        "tokenizer": {"plugin": "characters", "options": {"alphabet": "ab"}},
        "prompts": {"plugin": "jsonl", "options": {"path": str(prompts)}},
        "rollout": {
            "plugin": "emulated",
            "replicas": 2,
            "rows_in_flight": 8,  # as many as slots: one that waits here is one that another lacks
            "switch_mode": "in_flight" if bound else "auto",
            "sampling": {"max_new_tokens": 100_000},
        },
        "trainer": {"plugin": "emulated", "micro_batch_tokens": 512},
        "loss": {"plugin": "emulated"},
        "stages": {
            "reference": _stage("reference", ("response_ids",), ("ref_logprobs",), 4),
            "reward": _stage("reward", ("response_ids",), ("reward",), 4),
            "advantage": _stage("advantage", ("reward", "response_ids"), ("advantages",), SAMPLES)
            | {"whole_groups": True},
        },
        "workflow": workflow,
        "evaluation": None,
        "data_store": {"plugin": store},
        "weight_sync": {"plugin": "host"},
    }


def _stage(function: str, reads: Sequence[str], writes: Sequence[str], rows: int) -> dict[str, Any]:
    return {
        "function": f"asyncflow_emulated:{function}",
        "reads": list(reads),
        "writes": list(writes),
        "rows": rows,
    }


def run(preset: str, bound: int, steps: int, step_s: float, gigabytes: float, store: str) -> Result:
    """One run in processes of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loads = Loads(str(folder), step_s=step_s, gigabytes=gigabytes)
        file = folder / "config.yaml"
        file.write_text(json.dumps(config(folder, preset, bound, steps, store)))
        path = os.pathsep.join([str(EMULATED), os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            [sys.executable, "-m", "asyncflow_core.cli", "run", str(file)],
            check=True,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **loads.to_environment(), "PYTHONPATH": path},
        )
        summary = json.loads((folder / "runs" / "emulated" / "summary.json").read_text())
        logs = {p.stem: _lines(p) for p in folder.glob("*.jsonl") if p.stem != "prompts"}
    return measure(logs, steps, summary)


def _lines(path: Path) -> list[Line]:
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


def measure(logs: dict[str, list[Line]], steps: int, summary: dict[str, Any]) -> Result:
    """Shares of the measured steps."""
    trainer = logs["trainer-0"]
    updates = {number: (start, end) for what, start, end, number in trainer if what == "update"}
    first, last = updates[FIRST][1], updates[steps][1]
    wall = last - first
    work = [(s, e) for what, s, e, _ in trainer if what == "work" and first <= s < last]
    busy = sum(end - start for start, end in work)
    # The trainer, between the last gradient of a step and its update: it waits for the export.
    exposed = sum(
        start - max(e for _, e in work if e <= start)
        for number, (start, _) in updates.items()
        if number > FIRST
    )
    # A replica without any sequence, from the update until it serves what the update made.
    replicas = [lines for name, lines in logs.items() if name.startswith("rollout")]
    for lines in replicas:
        commits = {number: end for what, _, end, number in lines if what == "commit"}
        idle = [(s, e) for what, s, e, _ in lines if what == "idle"]
        for number, (_, updated) in updates.items():
            if FIRST <= number < steps and number in commits:
                exposed += sum(max(0.0, min(e, commits[number]) - max(s, updated)) for s, e in idle)
    return Result(
        step_s=wall / (steps - FIRST),
        waiting=1 - busy / wall,
        exposed=exposed / (wall * (1 + len(replicas))),
        summary=summary,
    )


def ideal(preset: str, steps: int) -> float:
    """Steps that a measured one would take if nothing cost time but the work."""
    known = {"sequential": sequential, "streaming": streaming}
    return known[preset](range(FIRST, steps)) if preset in known else 1.0


def main() -> int:
    """Run all, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-s", type=float, default=3.0)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--store", default="zmq")
    parser.add_argument("--only", default="", help="presets, as streaming,async1")
    arguments = parser.parse_args()
    runs = {"sequential": ("sequential", 0), "streaming": ("streaming", 0)}
    runs |= {f"async{bound}": ("async", bound) for bound in (1, 2, 4)}
    chosen = arguments.only.split(",") if arguments.only else list(runs)
    found: dict[str, Result] = {}
    os.environ |= Loads("", step_s=arguments.step_s).to_environment()
    shares = f"{'step':>8}{'ideal':>8}{'waits':>8}{'exposed':>9}"
    print(f"{'run':<12}{shares}{'max':>6}{'mean':>7}  staleness")
    for name in chosen:
        preset, bound = runs[name]
        found[name] = made = run(
            preset,
            bound,
            arguments.steps,
            arguments.step_s,
            arguments.gigabytes,
            arguments.store,
        )
        stale = made.summary
        print(
            f"{name:<12}{made.step_s / arguments.step_s:>8.3f}"
            f"{ideal(preset, arguments.steps):>8.3f}{made.waiting:>8.3f}"
            f"{made.exposed:>9.4f}{stale['max_staleness_trained']:>6}"
            f"{stale['mean_staleness_trained']:>7.2f}",
            flush=True,
        )
    if len(found) == len(runs):
        sequential, one = found["sequential"].step_s, found["async1"]
        bounds = {"0": "streaming", "1": "async1", "2": "async2", "4": "async4"}
        print(
            json.dumps(
                {
                    "streaming_over_sequential": round(sequential / found["streaming"].step_s, 3),
                    "async_over_sequential": round(sequential / one.step_s, 3),
                    "async_over_bound": round(one.step_s / arguments.step_s, 4),
                    "switch_exposed_share": round(one.exposed, 5),
                    **{
                        key: {
                            bound: round(found[name].summary[key], 3)
                            for bound, name in bounds.items()
                        }
                        for key in ("max_staleness_trained", "mean_staleness_trained")
                    },
                }
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
