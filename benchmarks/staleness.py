"""What staleness does to learning, with and without a correction, through the real pipeline.

    make bench BENCH=staleness

The main job with rollout eight versions ahead of the trainer, one optimizer update a step, so that
on-policy every loss has the same gradient. Uncorrected, stale samples are treated as fresh;
corrected, each token is weighted by how likely the current policy is to take it (`tis`), or the
ratio is clipped (`ppo_clip`). Held-out prompts are answered beside training. Draws
`docs/figures/staleness.svg`, prints a table, and last a JSON line. Status 1 if an uncorrected run
does not end below its start, or a corrected one not above it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from demo import EXAMPLE, ROOT, run

LAG = 8
STEPS = 120
FIGURE = ROOT / "docs" / "figures" / "staleness.svg"

JOB = [
    f"workflow.steps={STEPS}",
    "workflow.groups_per_step=32",
    "workflow.updates_per_step=1",
    "trainer.options={lr: 5.0e-4, warmup_updates: 5}",
    # Small micro-batches slow the trainer down, so that rollout stays ahead on a busy machine, too.
    "trainer.micro_batch_tokens=640",
    "evaluation={samples: 2, every: 10, share: 0.5}",
]
AHEAD = ["workflow.preset=async", f"workflow.max_staleness={LAG}", "workflow.pacing=false"]
ARMS = {
    # A cap below every ratio gives all tokens one weight, whose size AdamW does not see: the plain
    # policy gradient of stale samples.
    "uncorrected": [*AHEAD, "loss={plugin: tis, options: {cap: 1.0e-3}}"],
    "tis": [*AHEAD, "loss={plugin: tis, options: {cap: 2.0}}"],
    "ppo_clip": [*AHEAD, "loss={plugin: ppo_clip, options: {}}"],
    "on-policy": [
        "workflow.preset=streaming",
        "workflow.max_staleness=0",
        "loss={plugin: tis, options: {cap: 2.0}}",
    ],
}
CORRECTED = ("tis", "ppo_clip")
COLOURS = {"uncorrected": "#c0392b", "tis": "#2471a3", "ppo_clip": "#1e8449", "on-policy": "#777"}


def curve(folder: Path) -> dict[int, float]:
    """Version to held-out score."""
    lines = (folder / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {int(r["eval/version"]): r["eval/score"] for r in records}


def main() -> int:
    """Run all arms and seeds, draw, print; 1 if what is expected does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "runs")
    parser.add_argument("--figure", type=Path, default=FIGURE)
    parser.add_argument("overrides", nargs="*", help="dotted.key=value, for every run")
    arguments = parser.parse_args()
    subprocess.run([sys.executable, str(EXAMPLE / "prepare.py")], check=True)
    curves: dict[str, list[dict[int, float]]] = {arm: [] for arm in ARMS}
    mean: dict[str, list[float]] = {arm: [] for arm in ARMS}
    largest: dict[str, int] = dict.fromkeys(ARMS, 0)
    print("arm          seed  before  after   stale mean/max  wall_s")
    for seed in range(arguments.seeds):
        for arm, own in ARMS.items():
            name = f"staleness-{arm}"
            extra = [*JOB, *own, *arguments.overrides]
            summary = run(name, seed, arguments.out, extra)
            curves[arm].append(curve(arguments.out / f"demo-{name}-{seed}"))
            mean[arm].append(summary["mean_staleness_trained"])
            largest[arm] = max(largest[arm], summary["max_staleness_trained"])
            print(
                f"{arm:<12} {seed:<5} {summary['eval_before']:<7.3f} {summary['eval_after']:<7.3f} "
                f"{mean[arm][-1]:.2f}/{summary['max_staleness_trained']:<10} "
                f"{summary['wall_s']:.1f}",
                flush=True,
            )
    arguments.figure.parent.mkdir(parents=True, exist_ok=True)
    arguments.figure.write_text(figure(curves), encoding="utf-8")
    gained = {arm: [c[max(c)] - c[0] for c in found] for arm, found in curves.items()}
    falls = all(gain < 0 for gain in gained["uncorrected"])
    climbs = all(gain > 0 for arm in CORRECTED for gain in gained[arm])
    line = {
        "gained": {arm: [round(gain, 4) for gain in found] for arm, found in gained.items()},
        "mean_over_run": {
            arm: round(statistics.fmean(statistics.fmean(c.values()) for c in found), 4)
            for arm, found in curves.items()
        },
        "mean_staleness_trained": {a: round(statistics.fmean(m), 3) for a, m in mean.items()},
        "max_staleness_trained": largest,
        "uncorrected_falls": falls,
        "corrected_climbs": climbs,
    }
    print(json.dumps(line))
    return 0 if falls and climbs else 1


def figure(curves: dict[str, list[dict[int, float]]]) -> str:
    """An SVG of held-out score by version: means over seeds, and thin lines of each seed."""
    left, top, width, height = 60, 30, 520, 280

    def x(version: float) -> float:
        return left + width * version / STEPS

    def y(score: float) -> float:
        return top + height * (1 - score)

    def line(points: dict[int, float], colour: str, stroke: float, opacity: float = 1.0) -> str:
        path = " ".join(f"{x(v):.1f},{y(s):.1f}" for v, s in sorted(points.items()))
        return (
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{stroke}" '
            f'stroke-opacity="{opacity}"/>'
        )

    seeds = len(next(iter(curves.values())))
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 370" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="720" height="370" fill="white"/>',
        f'<text x="{left}" y="18">held-out exact match by version; rollout {LAG} versions ahead, '
        f"{seeds} seed{'s' if seeds > 1 else ''}, mean thick</text>",
    ]
    for tenth in range(0, 11, 2):
        score = tenth / 10
        parts.append(
            f'<line x1="{left}" x2="{left + width}" y1="{y(score):.1f}" y2="{y(score):.1f}" '
            f'stroke="#ddd"/><text x="{left - 8}" y="{y(score) + 4:.1f}" text-anchor="end">'
            f"{score:.1f}</text>"
        )
    parts += [
        f'<text x="{x(at):.1f}" y="{top + height + 18}" text-anchor="middle">{at}</text>'
        for at in range(0, STEPS + 1, 20)
    ]
    for number, (arm, found) in enumerate(curves.items()):
        colour = COLOURS[arm]
        if seeds > 1:
            parts += [line(points, colour, 1, 0.35) for points in found]
        versions = set.intersection(*(set(points) for points in found))
        means = {v: statistics.fmean(points[v] for points in found) for v in versions}
        parts.append(line(means, colour, 2.5))
        at = top + 20 + 22 * number
        parts.append(
            f'<line x1="600" x2="622" y1="{at}" y2="{at}" stroke="{colour}" stroke-width="2.5"/>'
            f'<text x="628" y="{at + 4}">{arm}</text>'
        )
    label = f'<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle">'
    parts.append(f"{label}completed steps (version)</text></svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
