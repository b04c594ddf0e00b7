"""Checks what a run of this example must show; prints each figure, exits 1 if one is missed.

python examples/spell_backward/check.py runs/demo
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

BEFORE_AT_MOST = 0.30
AFTER_AT_LEAST = 0.60
SECONDS_AT_MOST = 180.0


def main(folder: Path) -> int:
    """Compare `summary.json` with the limits and load the model."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    dropped = sum(summary["rows_dropped_by_reason"].values())
    checks = {
        f"eval_before {summary['eval_before']:.3f} <= {BEFORE_AT_MOST}": (
            summary["eval_before"] <= BEFORE_AT_MOST
        ),
        f"eval_after {summary['eval_after']:.3f} >= {AFTER_AT_LEAST}": (
            summary["eval_after"] >= AFTER_AT_LEAST
        ),
        f"total_s {summary['total_s']:.0f} <= {SECONDS_AT_MOST:.0f}": (
            summary["total_s"] <= SECONDS_AT_MOST
        ),
        f"max_staleness_trained {summary['max_staleness_trained']} <= "
        f"{summary['max_staleness_allowed']}": (
            summary["max_staleness_trained"] <= summary["max_staleness_allowed"]
        ),
        f"rows_put {summary['rows_put']} = trained {summary['rows_trained']} + dropped {dropped}": (
            summary["rows_put"] == summary["rows_trained"] + dropped
        ),
        "transformers loads model/": _loads(folder / "model"),
    }
    for check, holds in checks.items():
        print(f"{'ok    ' if holds else 'MISSED'} {check}")
    return 0 if all(checks.values()) else 1


def _loads(model: Path) -> bool:
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = tokenizer("flow>", return_tensors="pt")
    output = AutoModelForCausalLM.from_pretrained(model).generate(
        **prompt, max_new_tokens=8, do_sample=False
    )
    print(f"       flow> {tokenizer.decode(output[0], skip_special_tokens=True)}")
    return bool(output.shape[1] > prompt.input_ids.shape[1])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
