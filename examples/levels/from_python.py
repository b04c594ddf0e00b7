"""Level 2: the run is put together in Python; functions are stages, plugins are chosen by name."""

from pathlib import Path

import asyncflow_core as af

PROMPTS = Path(__file__).parents[1] / "next_letter" / "prompts.jsonl"


def right_letter(response: str, answer: str) -> float:
    return float(response == answer)


def main() -> None:
    flow = af.Flow(
        name="from_python",
        tokenizer=af.use("characters", alphabet="abcdefghijklmnopqrstuvwxyz"),
        prompts=af.use("jsonl", path=str(PROMPTS), evaluation_share=0.2),
        rollout=af.use("tabular", replicas=2, sampling={"max_new_tokens": 1}),
        trainer=af.use("tabular", lr=20.0),
        loss=af.use("tabular_ppo_clip"),
        stages={"reward": af.reward(right_letter), "advantage": af.use("grpo")},
        workflow={"preset": "async", "steps": 60, "groups_per_step": 32, "group_size": 8},
    )
    for step in flow.run():
        if step.version % 20 == 0:
            print(f"step {step.version}: reward {step.metrics['reward/mean']:.3f}")
    summary = flow.summary
    print(f"held-out score {summary.eval_before:.3f} before, {summary.eval_after:.3f} after")


if __name__ == "__main__":
    main()
