"""The planner against real runs: one profile, and what it predicts for other allocations.

    make bench BENCH=plan        (about 11 minutes)

Real processes and the store of the default launcher; the engines sleep for the time of their work
(`benchmarks/emulated`), so that two cores show what a cluster would. One run is the profile. Every
other one is predicted from it alone by `asyncflow plan --profile`, then run. Prints predicted over
measured seconds a step, and last a JSON line. Measured are the steps from the eighth on, for their
mean; the profile's own line tells how well the simulation repeats what it was made from.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EMULATED = ROOT / "benchmarks" / "emulated"
sys.path[:0] = [str(EMULATED), str(ROOT / "benchmarks")]

from asyncflow_emulated import Loads  # noqa: E402
from workflow import config as workflow_config  # noqa: E402

FIRST = 8
"""Steps before this one are the start of the pipeline."""


@dataclass(frozen=True)
class Case:
    """A run: a preset and how many of each."""

    preset: str
    bound: int
    replicas: int
    ranks: int
    workers: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """As the table names it."""
        more = "".join(f" {name} x{n}" for name, n in self.workers.items())
        ahead = self.bound if self.preset == "async" else ""
        return f"{self.preset}{ahead} {self.replicas}+{self.ranks}{more}"


PROFILE = Case("async", 1, 2, 1)
CASES = (
    PROFILE,
    Case("sequential", 0, 2, 1),
    Case("streaming", 0, 2, 1),
    Case("streaming", 0, 4, 1),
    Case("delayed", 1, 3, 1),
    Case("async", 1, 1, 1),
    Case("async", 2, 3, 1),
    Case("async", 1, 3, 2),
    Case("async", 1, 4, 2),
    Case("async", 1, 4, 2, {"reference": 2}),
)


def write(case: Case, folder: Path, steps: int, store: str) -> Path:
    """The configuration of a run, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    made = workflow_config(folder, case.preset, case.bound, steps, store)
    made["rollout"]["replicas"] = case.replicas
    made["trainer"]["world_size"] = case.ranks
    for name, workers in case.workers.items():
        made["stages"][name]["workers"] = workers
    file = folder / "config.yaml"
    file.write_text(json.dumps(made))
    return file


def asyncflow(*arguments: str, folder: Path, loads: Loads) -> str:
    """The command's standard output."""
    path = os.pathsep.join([str(EMULATED), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "asyncflow_core.cli", *arguments],
        check=True,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **loads.to_environment(), "PYTHONPATH": path},
    )
    return done.stdout


def measure(run: Path) -> dict[str, float]:
    """Mean seconds and staleness of the measured steps."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [step for step in steps if step["version"] > FIRST]
    return {
        name: statistics.fmean(step[key] for step in found)
        for name, key in (("step_s", "flow/step_wall_s"), ("staleness", "staleness/mean"))
    }


def predict(case: Case, file: Path, profile: Path, loads: Loads, steps: int) -> dict[str, Any]:
    """What the command says of this very allocation."""
    devices = case.replicas + case.ranks
    said = asyncflow(
        *("plan", str(file), "--profile", str(profile), "--devices", str(devices)),
        *("--trainer-ranks", str(case.ranks), "--steps", str(steps - FIRST), "--json"),
        folder=file.parent,
        loads=loads,
    )
    found: dict[str, Any] = json.loads(said)["present"]
    return found


def main() -> int:
    """Run all, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=2.0)
    parser.add_argument("--gigabytes", type=float, default=0.07)
    parser.add_argument("--store", default="memory")
    parser.add_argument("--keep", help="folder for runs; those there are not made again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(arguments.keep or temporary)
        ratios: dict[str, float] = {}
        print(
            f"{'run':<26}{'predicted':>10}{'measured':>9}{'ratio':>7}{'stale':>7}{'really':>7}  "
            "held up by"
        )
        for number, case in enumerate(CASES):
            folder = (base / str(number)).resolve()
            loads = Loads(str(folder), step_s=arguments.step_s, gigabytes=arguments.gigabytes)
            file = write(case, folder, arguments.steps, arguments.store)
            run = folder / "runs" / "emulated"
            if not (run / "summary.json").is_file():
                asyncflow("run", str(file), folder=folder, loads=loads)
            measured = measure(run)
            profile = (base / "0" / "runs" / "emulated").resolve()
            found = predict(case, file, profile, loads, arguments.steps)
            ratios[str(case)] = ratio = found["step_s"] / measured["step_s"]
            print(
                f"{case!s:<26}{found['step_s']:>10.3f}{measured['step_s']:>9.3f}{ratio:>7.3f}"
                f"{found['staleness_mean']:>7.2f}{measured['staleness']:>7.2f}  "
                f"{found['bottleneck']['what'] or '-'}",
                flush=True,
            )
    apart = {name: abs(ratio - 1) for name, ratio in ratios.items()}
    print(
        json.dumps(
            {
                "mean_apart": round(statistics.fmean(apart.values()), 4),
                "most_apart": round(max(apart.values()), 4),
                "ratios": {name: round(ratio, 4) for name, ratio in ratios.items()},
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
