"""The run of config.yaml from Python, in this process: a reward is a function, a sweep is a loop.

python examples/next_letter/in_python.py
"""

from __future__ import annotations

import string
from pathlib import Path

import asyncflow_core as af

PROMPTS = Path(__file__).with_name("prompts.jsonl")


def right_letter(response: str, answer: str) -> float:
    """1 for the right letter and nothing after it."""
    return float(response == answer)


def make_flow(*, max_staleness: int, steps: int = 60, out: str = "runs") -> af.Flow:
    """A checked run; `ConfigError` has every fault, and nothing was started."""
    return af.Flow(
        name=f"next_letter_{max_staleness}",
        out=out,
        tokenizer=af.use("characters", alphabet=string.ascii_lowercase),
        prompts=af.use("jsonl", path=str(PROMPTS), evaluation_share=0.2),
        rollout=af.use("tabular", slots=64, sampling={"max_new_tokens": 1}),
        trainer=af.use("tabular", lr=20.0),
        loss=af.use("tabular_ppo_clip"),
        stages={"reward": af.reward(right_letter), "advantage": af.use("grpo")},
        workflow={
            "max_staleness": max_staleness,
            "steps": steps,
            "groups_per_step": 32,
            "group_size": 8,
        },
        weight_sync=af.use("memory"),  # trainer and replica share this process
        launcher=af.use("inline"),
    )


def main() -> None:
    """Train at two staleness bounds."""
    for max_staleness in (0, 2):
        flow = make_flow(max_staleness=max_staleness)
        for step in flow.run():
            if step.version % 20 == 0:
                print(step.version, round(step.metrics["reward/mean"], 3))
        summary = flow.summary
        print(f"bound {max_staleness}: {summary.eval_before:.3f} -> {summary.eval_after:.3f}")


if __name__ == "__main__":
    main()
