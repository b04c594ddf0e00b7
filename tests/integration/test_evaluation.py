"""Evaluation beside training, in whole runs."""

import json

import pytest

from asyncflow_core import Flow

pytestmark = pytest.mark.multiproc


def test_training_does_not_wait_for_an_evaluation_beside_it(inline, tmp_path, caplog):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": c}) + "\n" for c in "xyz"))
    flow = Flow(
        **inline(
            prompts__options__evaluation_path=str(held_out),
            evaluation={"every": 1, "samples": 1, "share": 0.001},  # one prompt at a time
            stages__reward={
                "function": "functions:slow_for_xyz",
                "kind": "reward",
                "workers": 2,
                "rows": 1,
            },
            workflow__steps=30,
        )
    )
    steps = list(flow.run())
    assert len(steps) == 30
    scores = flow.summary.eval_scores
    # Had a step waited for the evaluation of its version, which takes many steps, all were there.
    assert {"0", "1", "30"} <= set(scores)
    assert len(scores) < 31
    assert any("is not evaluated" in record.message for record in caplog.records)
    samples = [json.loads(s) for s in (flow.folder / "samples.jsonl").read_text().splitlines()]
    seen = [s for s in samples if s["prompt"] in "xyz"]
    assert {s["batch"] for s in seen} == {None}
    assert len(seen) == flow.summary.rows_evaluated == 3 * len(scores)
    records = [json.loads(s) for s in (flow.folder / "evaluations.jsonl").read_text().splitlines()]
    assert [int(r["eval/version"]) for r in records] == [int(version) for version in scores]
    for record in records:
        assert record["eval/oldest_version"] >= record["eval/version"]
        assert record["eval/rows"] == 3


def test_evaluation_comes_forward_where_rollout_is_the_bottleneck(inline):
    flow = Flow(
        **inline(
            prompts__options__evaluation_share=0.3,
            evaluation={"every": 4, "samples": 2, "limit": 1, "share": 0.3},
            rollout__rows_in_flight=8,
            rollout__options={"token_s": 0.01},
            workflow__steps=16,
            workflow__max_staleness=4,  # there is always a training row that could start
        )
    )
    steps = list(flow.run())
    assert {"0", "4", "16"} <= set(flow.summary.eval_scores)
    told = [s.metrics["eval/version"] for s in steps if "eval/version" in s.metrics]
    assert told[:2] == [0, 4]  # in the line of a step, so before training was over
