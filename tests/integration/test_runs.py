"""Whole runs: counts, versions, staleness, ranks, files."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from asyncflow_core import Flow
from asyncflow_core.flow.processes import waits
from asyncflow_core.flow.running.results import Summary
from asyncflow_core.parts import KEY_COLUMN

pytestmark = pytest.mark.multiproc


def lines(folder, name):
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def finished(tree):
    """Run it; summary, metrics a step, training samples."""
    flow = Flow(**tree)
    list(flow.run())
    samples = [s for s in lines(flow.folder, "samples.jsonl") if s["batch"] is not None]
    return flow.summary, lines(flow.folder, "metrics.jsonl"), samples


def assert_consistent(summary, metrics, samples):
    assert [m["version"] for m in metrics] == list(range(1, summary.steps + 1))
    keys = [s["key"] for s in samples]
    assert len(set(keys)) == len(keys) == summary.rows_trained
    assert summary.rows_put == summary.rows_trained + sum(summary.rows_dropped_by_reason.values())
    stale = [s["batch"] - min(v for v, _ in s["versions"]) for s in samples]
    assert max(stale) == summary.max_staleness_trained <= summary.max_staleness_allowed
    assert np.mean(stale) == pytest.approx(summary.mean_staleness_trained)
    assert sum(m["trainer/tokens"] for m in metrics) == pytest.approx(
        summary.tokens_per_s * summary.wall_s
    )
    for step in metrics:
        rewards = [s["reward"] for s in samples if s["batch"] == step["version"] - 1]
        assert step["reward/mean"] == pytest.approx(np.mean(rewards))


def test_processes_leave_complete_files_and_clean_logs(settings, tmp_path):
    tree = settings(
        rollout__replicas=3,
        rollout__rows_in_flight=8,
        trainer__world_size=2,
        evaluation={"samples": 2},
        workflow__steps=12,
        prompts__options__evaluation_share=0.3,
        seed=7,
    )
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(tree))
    done = subprocess.run(
        [sys.executable, "-m", "asyncflow_core.cli", "run", str(config)],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    folder = tmp_path / "runs" / "small"
    summary = Summary(**json.loads((folder / "summary.json").read_text()))
    metrics = lines(folder, "metrics.jsonl")
    samples = lines(folder, "samples.jsonl")
    training = [s for s in samples if s["batch"] is not None]
    assert_consistent(summary, metrics, training)
    assert len(samples) - len(training) == summary.rows_evaluated > 0
    assert summary.rows_put == summary.rows_trained == 12 * 16
    assert summary.seed == 7
    assert summary.eval_before is not None
    assert summary.eval_after >= summary.eval_before
    assert 0 < summary.busy_rollout <= 1
    assert 0 < summary.busy_trainer <= 1
    assert 0 < summary.wall_s < summary.total_s
    services = {"rollout-0", "rollout-1", "rollout-2", "trainer-0", "trainer-1"}
    services |= {"reward-0", "advantage-0"}
    assert {log.stem for log in (folder / "logs").iterdir()} == services
    for log in (folder / "logs").iterdir():
        text = log.read_text()
        assert " serves " in text
        for word in ("Traceback", "Warning", "WARNING", "ERROR", "never retrieved"):
            assert word not in text, text
    assert {field.name for field in fields(Summary)} == set(
        json.loads((folder / "summary.json").read_text())
    )


def test_two_ranks_in_processes_learn_the_same_as_one(settings, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    runs = [
        finished(
            settings(
                name=f"ranks{ranks}",
                trainer__world_size=ranks,
                workflow__preset="sequential",
                stages__reward__function="functions:low_letter",
            )
        )
        for ranks in (1, 2)
    ]
    (_, one, one_samples), (_, two, two_samples) = runs
    assert sorted(one_samples, key=str) == sorted(two_samples, key=str)
    for a, b in zip(one, two, strict=True):
        for name in ("reward/mean", "trainer/loss", "trainer/grad_norm", "trainer/tokens"):
            assert a[name] == pytest.approx(b[name], rel=1e-9, abs=1e-9)
    assert all(step["trainer/grad_norm"] > 0.01 for step in one)


def test_replicas_share_the_work_and_every_row_is_trained_once(inline):
    summary, metrics, samples = finished(
        inline(
            rollout__replicas=3,
            rollout__rows_in_flight=4,
            rollout__options={"token_s": 0.002},
            workflow__steps=6,
        )
    )
    assert_consistent(summary, metrics, samples)
    assert summary.rows_put == summary.rows_trained == 6 * 16
    # One replica of four rows in flight would need four ticks a step, three need two.
    assert summary.busy_rollout > 0


def test_sequential_trains_only_the_trainers_own_version(inline):
    summary, metrics, samples = finished(inline(workflow__preset="sequential", workflow__steps=5))
    assert_consistent(summary, metrics, samples)
    assert {v for s in samples for v, _ in s["versions"]} == set(range(5))
    assert all(v == s["batch"] for s in samples for v, _ in s["versions"])
    assert summary.max_staleness_trained == summary.max_staleness_allowed == 0
    assert all(m["staleness/updates_max"] == 0 for m in metrics)


@pytest.mark.parametrize(
    ("preset", "bound"), [("sequential", 0), ("streaming", 0), ("delayed", 1), ("async", 1)]
)
def test_each_preset_keeps_its_own_bound(inline, preset, bound):
    summary, metrics, samples = finished(
        inline(
            workflow__preset=preset,
            workflow__steps=6,
            rollout__options={"token_s": 0.002},
            rollout__sampling={"max_new_tokens": 3},
        )
    )
    assert_consistent(summary, metrics, samples)
    assert summary.max_staleness_trained == summary.max_staleness_allowed == bound


def test_sequential_tasks_take_turns_over_the_whole_batch(inline):
    calls = []

    def taking_turns(name, writes):
        def stage(batch):
            assert set(batch) <= {"response_ids", KEY_COLUMN}  # what it waits for it does not get
            calls.append((name, batch.rows))
            return {writes: [0.0] * batch.rows}

        return stage

    shared = {"workers": 2, "rows": 4}
    flow = inline(
        workflow__preset="sequential",
        evaluation=None,
        rollout__rows_in_flight=3,
        rollout__options={"token_s": 0.002},
        stages__first={
            "function": taking_turns("first", "a"),
            "reads": ["response_ids"],
            "writes": ["a"],
            **shared,
        },
        stages__second={
            "function": taking_turns("second", "b"),
            "reads": ["response_ids"],  # it needs nothing of `first`
            "writes": ["b"],
            **shared,
        },
    )
    summary, metrics, samples = finished(flow)
    assert_consistent(summary, metrics, samples)
    names = [name for name, rows in calls for _ in range(rows)]
    assert names == (["first"] * 16 + ["second"] * 16) * summary.steps


@pytest.mark.parametrize("bound", [1, 2, 4])
@pytest.mark.parametrize("slow", ["rollout", "trainer"])
def test_async_keeps_its_bound(inline, bound, slow):
    changes = {
        "rollout": {"rollout__options": {"token_s": 0.005}},
        "trainer": {"trainer__plugin": "misbehave", "trainer__options": {"step_s": 0.02}},
    }[slow]
    summary, metrics, samples = finished(
        inline(
            **changes,
            workflow__steps=12,
            workflow__max_staleness=bound,
            rollout__sampling={"max_new_tokens": 3},
            rollout__rows_in_flight=16,
        )
    )
    assert_consistent(summary, metrics, samples)
    assert summary.max_staleness_allowed == bound
    assert 0 < summary.mean_staleness_trained <= bound
    if slow == "trainer":
        assert summary.max_staleness_trained == bound


def test_prompts_fewer_than_a_batch_cycle_through_epochs(inline, tmp_path):
    prompts = tmp_path / "two.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    summary, metrics, samples = finished(
        inline(prompts__options={"path": str(prompts)}, evaluation=None)
    )
    assert_consistent(summary, metrics, samples)
    epochs = {s["key"].split("/")[1] for s in samples}
    assert len(epochs) == 4 * 4 // 2
    assert summary.eval_before is None
    assert summary.eval_after is None
    assert summary.rows_evaluated == 0


def test_several_updates_a_step_count_their_staleness(inline):
    summary, metrics, samples = finished(inline(workflow__updates_per_step=2))
    assert_consistent(summary, metrics, samples)
    assert summary.max_staleness_updates == 2 * summary.max_staleness_trained + 1


def test_long_wait_is_said_with_who_holds_the_rows(inline, monkeypatch, caplog):
    monkeypatch.setattr(waits, "SAY_AFTER_S", 0.1)
    with caplog.at_level(logging.WARNING):
        finished(
            inline(
                rollout__options={"token_s": 0.3},
                rollout__sampling={"max_new_tokens": 2},
                workflow__steps=1,
            )
        )
    said = [r.getMessage() for r in caplog.records if r.name == waits.__name__]
    assert any("step 1 is not done after" in line for line in said)
    assert any("held by rollout-0" in line for line in said)
