"""Whole runs under each policy: the bound, the batches, and what is thrown away, counted."""

import json
from collections import Counter

import numpy as np
import pytest

from asyncflow_core import Flow
from asyncflow_core.errors import ConfigError

pytestmark = pytest.mark.multiproc


def lines(flow, name):
    return [json.loads(line) for line in (flow.folder / name).read_text().splitlines()]


def finished(tree):
    flow = Flow(**tree)
    steps = list(flow.run())
    samples = [s for s in lines(flow, "samples.jsonl") if s["batch"] is not None]
    return flow.summary, steps, samples


def assert_counts(summary, *, steps, rows):
    assert summary.steps == steps
    assert summary.rows_trained + summary.rows_masked == steps * rows
    assert summary.max_staleness_trained <= summary.max_staleness_allowed
    dropped = sum(summary.rows_dropped_by_reason.values())
    assert summary.rows_put == summary.rows_trained + summary.rows_masked + dropped
    assert sum(summary.rows_by_staleness.values()) == summary.rows_trained


def by_group(samples):
    groups = {}
    for sample in samples:
        groups.setdefault(sample["key"].rpartition("/")[0], []).append(sample)
    return groups


@pytest.mark.parametrize("preset", ["async", "streaming", "sequential"])
def test_dynamic_sampling_trains_only_groups_that_differ_in_full_batches(inline, preset):
    summary, _, samples = finished(
        inline(
            workflow__preset=preset,
            workflow__dynamic_sampling=True,
            workflow__group_size=2,
            workflow__steps=6,
            stages__reward__function="functions:early_letter",
            evaluation={"every": 2, "samples": 2},
            prompts__options__evaluation_share=0.3,
        )
    )
    assert_counts(summary, steps=6, rows=8)
    thrown = summary.rows_dropped_by_reason["all rewards equal"]
    assert thrown >= 2
    assert summary.tokens_wasted_by_reason["all rewards equal"] == thrown  # a token a row
    groups = by_group(samples)
    assert len(groups) == 24
    assert all(len({s["reward"] for s in found}) == 2 for found in groups.values())
    assert Counter(found[0]["batch"] for found in groups.values()) == dict.fromkeys(range(6), 4)
    assert list(summary.eval_scores) == ["0", "2", "4", "6"]  # held-out groups pass


def test_over_sampling_stops_the_last_groups_of_each_batch_and_says_it_is_biased(inline, caplog):
    summary, _, _ = finished(
        inline(
            workflow__extra_groups=2,
            workflow__steps=6,
            rollout__options={"token_s": 0.002},
            rollout__rows_in_flight=4,
        )
    )
    assert_counts(summary, steps=6, rows=16)
    assert summary.rows_dropped_by_reason == {"straggler": 6 * 2 * 4}
    assert any("what is trained is shorter" in r.getMessage() for r in caplog.records)
    wasted = summary.tokens_wasted_by_reason
    assert set(wasted) <= {"straggler", "switch or abort"}
    assert 0 < sum(wasted.values()) <= summary.tokens_generated - summary.tokens_trained


@pytest.mark.parametrize("too_stale", ["requeue", "drop", "mask"])
def test_ready_first_keeps_the_bound_and_counts_what_is_too_old(inline, too_stale):
    more = {} if too_stale == "requeue" else {"workflow__too_stale": too_stale}
    summary, steps, samples = finished(
        inline(
            workflow__order="ready_first",
            workflow__steps=12,
            workflow__groups_per_step=2,
            workflow__group_size=2,
            rollout__options={"token_s": 0.005},
            rollout__sampling={"max_new_tokens": 80},
            stages__reward__function="functions:shorter",
            **more,
        )
    )
    if too_stale == "drop":  # groups may have become smaller
        assert summary.rows_put == summary.rows_trained + sum(
            summary.rows_dropped_by_reason.values()
        )
        assert summary.max_staleness_trained <= 1
    else:
        assert_counts(summary, steps=12, rows=4)
    # Responses of up to 80 tokens, and a step whenever two prompts are answered.
    assert summary.rows_dropped_by_reason.get("too stale", 0) + summary.rows_masked > 0
    wasted = summary.tokens_wasted_by_reason["too stale"]
    assert 0 < wasted < summary.tokens_generated
    if too_stale != "drop":
        assert summary.tokens_generated == summary.tokens_trained + wasted
    assert all(np.isfinite(step.metrics["reward/mean"]) for step in steps)
    assert len({s["key"] for s in samples}) == len(samples)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"workflow__too_stale": "drop"}, "too_stale has no effect with order batches"),
        (
            {"workflow__order": "ready_first", "workflow__extra_groups": 1},
            "order ready_first takes preset async, no extra_groups",
        ),
        ({"workflow__order": "ready_first", "workflow__preset": "streaming"}, "takes preset async"),
        (
            {"workflow__order": "ready_first", "checkpoint__every": 2},
            "order ready_first cannot be resumed",
        ),
        ({"workflow__dynamic_sampling": True, "workflow__group_size": 1}, "group_size is 1"),
    ],
)
def test_policies_that_do_not_go_together_are_refused(inline, changes, fault):
    with pytest.raises(ConfigError, match=fault):
        Flow(**inline(**changes))
