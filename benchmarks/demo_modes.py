"""The main job in all four presets: how long a step takes against its bound, and what is learnt.

    make bench BENCH=demo_modes

The bound of a step is the pure work that has to come one after another: what the trainer and the
rollout were busy, added up in `sequential`, the larger of the two where they overlap. Seeds are the
outer loop and presets the inner one, so that drifting machine speed meets all of them. Prints a
table, whether all presets learn the same as `sequential` (means within 0.05, or within twice the
standard error of their difference), and last a JSON line. Status 1 if they do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from demo import EXAMPLE, ROOT, run, same

PRESETS = {
    "sequential": 0,
    "streaming": 0,
    "delayed": 1,
    "async": 1,
}
"""Preset to its bound in versions."""


def over_bound(preset: str, summary: dict[str, float]) -> float:
    """Wall time over the work that cannot overlap in this preset."""
    rollout, trainer = summary["busy_rollout"], summary["busy_trainer"]
    return 1 / (rollout + trainer if preset == "sequential" else max(rollout, trainer))


def main() -> int:
    """Run all, print, return 1 if a preset learns something else."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "runs")
    parser.add_argument("overrides", nargs="*", help="dotted.key=value, for every run")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, str(EXAMPLE / "prepare.py")], check=True)
    found: dict[str, list[dict[str, float]]] = {preset: [] for preset in PRESETS}
    print("preset      seed  before  after   s/step  over bound  stale mean/max  busy r/t")
    for seed in range(arguments.seeds):
        for preset, bound in PRESETS.items():
            own = [f"workflow.preset={preset}", f"workflow.max_staleness={bound}"]
            summary = run(f"mode-{preset}", seed, arguments.out, [*own, *arguments.overrides])
            found[preset].append(summary)
            print(
                f"{preset:<11} {seed:<5} {summary['eval_before']:<7.3f} "
                f"{summary['eval_after']:<7.3f} {summary['wall_s'] / summary['steps']:<7.3f} "
                f"{over_bound(preset, summary):<11.2f} "
                f"{summary['mean_staleness_trained']:.2f}/{summary['max_staleness_trained']:<10} "
                f"{summary['busy_rollout']:.0%}/{summary['busy_trainer']:.0%}",
                flush=True,
            )
    after = {preset: [r["eval_after"] for r in runs] for preset, runs in found.items()}
    step_s = {
        preset: statistics.median(r["wall_s"] / r["steps"] for r in runs)
        for preset, runs in found.items()
    }
    alike = {}
    for preset in PRESETS:
        difference, allowed, holds = same(after[preset], after["sequential"])
        alike[preset] = holds
        print(
            f"{preset}: mean {statistics.fmean(after[preset]):.3f}, {difference:+.3f} from "
            f"sequential; allowed: 0.05 or {allowed:.3f}: {'holds' if holds else 'MISSED'}"
        )
    line = {
        "after": after,
        "learns_the_same": all(alike.values()),
        "step_s": {preset: round(seconds, 4) for preset, seconds in step_s.items()},
        "over_bound": {
            preset: round(statistics.median(over_bound(preset, r) for r in runs), 3)
            for preset, runs in found.items()
        },
        "sequential_over": {
            preset: round(step_s["sequential"] / seconds, 3) for preset, seconds in step_s.items()
        },
        "max_staleness_trained": {
            preset: max(r["max_staleness_trained"] for r in runs) for preset, runs in found.items()
        },
        "mean_staleness_trained": {
            preset: round(statistics.fmean(r["mean_staleness_trained"] for r in runs), 3)
            for preset, runs in found.items()
        },
    }
    print(json.dumps(line))
    return 0 if all(alike.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
