"""Level 1: the whole run is a file; Python only starts it, and changes what it likes."""

from pathlib import Path

from asyncflow_core import Flow

CONFIG = Path(__file__).parents[1] / "next_letter" / "config.yaml"


def main() -> None:
    flow = Flow.from_config(CONFIG, {"workflow.steps": 60, "workflow.max_staleness": 2})
    for step in flow.run():
        if step.version % 20 == 0:
            print(f"step {step.version}: reward {step.metrics['reward/mean']:.3f}")
    summary = flow.summary
    print(f"held-out score {summary.eval_before:.3f} before, {summary.eval_after:.3f} after")


if __name__ == "__main__":
    main()
