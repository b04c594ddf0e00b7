"""The main job over three seeds, asynchronous and sequential, from one base model.

    make bench BENCH=demo

Prints a table, whether both presets learn the same (3-seed means within 0.05, or within twice the
standard error of their difference) and whether the curves have levelled off, and last a JSON line.
Runs alternate between the presets, so that drifting machine speed meets both.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "spell_backward"
PRESETS = {
    "async": ["workflow.preset=async", "workflow.max_staleness=1"],
    "sequential": ["workflow.preset=sequential", "workflow.max_staleness=0"],
}


def run(preset: str, seed: int, out: Path, extra: list[str]) -> dict[str, float]:
    """One run in processes of its own; its summary, and the mean reward by fifths of the run."""
    name = f"demo-{preset}-{seed}"
    command = [sys.executable, "-m", "asyncflow_core.cli", "run", str(EXAMPLE / "config.yaml")]
    own = PRESETS.get(preset, [])
    overrides = [f"name={name}", f"seed={seed}", f"out={out}", *own, *extra]
    subprocess.run([*command, *overrides], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    folder = out / name
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [json.loads(line)["reward/mean"] for line in lines]
    fifth = max(1, len(rewards) // 5)
    summary["curve"] = [
        round(statistics.fmean(rewards[first : first + fifth]), 3)
        for first in range(0, fifth * 5, fifth)
    ]
    return summary


def same(first: list[float], second: list[float]) -> tuple[float, float, bool]:
    """Difference of means, twice its standard error, and whether the criterion holds."""
    difference = statistics.fmean(first) - statistics.fmean(second)
    if min(len(first), len(second)) < 2:
        return difference, math.inf, True
    variance = statistics.variance(first) / len(first) + statistics.variance(second) / len(second)
    bound = 2 * math.sqrt(variance)
    return difference, bound, abs(difference) <= max(0.05, bound)


def main() -> int:
    """Run all, print, return 1 if a criterion is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "runs")
    parser.add_argument("overrides", nargs="*", help="dotted.key=value, for every run")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, str(EXAMPLE / "prepare.py")], check=True)
    results: dict[str, list[dict[str, float]]] = {preset: [] for preset in PRESETS}
    print("preset      seed  before  after   wall_s  stale mean/max  busy r/t    reward by fifths")
    for seed in range(arguments.seeds):
        for preset in PRESETS:
            found = run(preset, seed, arguments.out, arguments.overrides)
            results[preset].append(found)
            print(
                f"{preset:<11} {seed:<5} {found['eval_before']:<7.3f} {found['eval_after']:<7.3f} "
                f"{found['wall_s']:<7.1f} {found['mean_staleness_trained']:.2f}/"
                f"{found['max_staleness_trained']:<9} {found['busy_rollout']:.0%}/"
                f"{found['busy_trainer']:.0%}     {found['curve']}",
                flush=True,
            )
    after = {preset: [r["eval_after"] for r in found] for preset, found in results.items()}
    difference, bound, holds = same(after["async"], after["sequential"])
    level = {
        preset: statistics.fmean(r["curve"][-1] - r["curve"][-2] for r in found)
        for preset, found in results.items()
    }
    print(
        f"means: async {statistics.fmean(after['async']):.3f}, sequential "
        f"{statistics.fmean(after['sequential']):.3f}, difference {difference:+.3f}; allowed: 0.05 "
        f"or twice its standard error, {bound:.3f}: {'holds' if holds else 'MISSED'}"
    )
    print(
        "reward gained from the fourth to the last fifth: "
        + ", ".join(f"{preset} {gain:+.3f}" for preset, gain in level.items())
    )
    seconds = {preset: [r["wall_s"] for r in found] for preset, found in results.items()}
    line = {
        "async_after": after["async"],
        "sequential_after": after["sequential"],
        "difference": round(difference, 4),
        "two_standard_errors": round(bound, 4),
        "learns_the_same": holds,
        "sequential_over_async_wall": round(
            statistics.median(seconds["sequential"]) / statistics.median(seconds["async"]), 3
        ),
        "max_staleness_trained": {
            preset: max(r["max_staleness_trained"] for r in found)
            for preset, found in results.items()
        },
    }
    print(json.dumps(line))
    return 0 if holds and min(after["async"]) >= 0.60 else 1


if __name__ == "__main__":
    sys.exit(main())
