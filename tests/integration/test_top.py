"""`asyncflow top` on a real run: while it goes on, when it is done, when it was killed."""

import json
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multiproc


def top(run, *flags):
    done = subprocess.run(
        [sys.executable, "-m", "asyncflow_core.cli", "top", str(run.folder), *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def status(run):
    """What `top` reads, without the time its start takes."""
    return json.loads((run.folder / "status.json").read_bytes())


async def test_top_shows_a_run_going_on_then_its_end(started):
    run = started(
        workflow__steps=200,
        rollout__replicas=2,
        rollout__options={"token_s": 0.02},
        evaluation={"every": 50, "samples": 2},
        prompts__options__evaluation_share=0.3,
    )
    await run.until(lambda: (run.folder / "status.json").exists())
    await run.until(lambda: run.steps() >= 5 and status(run)["version"] >= 5)
    now = status(run)
    assert (now["state"], now["run"], now["steps"]) == ("running", "run0", 200)
    tasks = {worker["name"]: worker["task"] for worker in now["workers"]}
    assert tasks == {
        "rollout-0": "rollout",
        "rollout-1": "rollout",
        "trainer-0": "train",
        "reward-0": "reward",
        "advantage-0": "advantage",
        "recorder": "record",
    }
    assert all(0 <= worker["busy"] <= 1 for worker in now["workers"])
    assert set(now["store"]["tasks"]) == {*("rollout", "reward", "advantage", "train", "record")}
    assert sum(now["staleness"]["rows"].values()) == 16 * now["version"]
    assert now["waits"]
    code, text, _ = top(run, "--once")
    assert code == 0
    assert "run run0: running" in text
    assert max(map(len, text.splitlines())) < 80

    run.process.wait(60)
    assert run.process.returncode == 0, run.output
    code, text, err = top(run, "--json")
    assert code == 0, err
    end = json.loads(text)
    summary = end["summary"]
    assert (end["state"], end["version"]) == ("finished", 200)
    assert [version for version, _ in end["scores"]] == [0, 50, 100, 150, 200]
    assert summary["eval_scores"] == {str(version): score for version, score in end["scores"]}
    tokens = end["tokens"]
    assert tokens["trained"] == summary["rows_trained"] == 3200  # a token a row
    assert tokens["evaluated"] == summary["rows_evaluated"]
    wasted = sum(tokens["wasted"].values())
    assert tokens["generated"] == tokens["trained"] + tokens["evaluated"] + wasted
    lines = [json.loads(s) for s in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["eval/version"] for m in lines if "eval/version" in m] == [0, 50, 100, 150]
    samples = [json.loads(s) for s in (run.folder / "samples.jsonl").read_text().splitlines()]
    held_out = {s["prompt"] for s in samples if s["batch"] is None}
    assert held_out
    assert not held_out & {s["prompt"] for s in samples if s["batch"] is not None}


async def test_top_of_a_run_that_was_interrupted_and_of_one_that_was_killed(started):
    first, second = started(workflow__steps=10_000), started(workflow__steps=10_000)
    for run, number in ((first, signal.SIGTERM), (second, signal.SIGKILL)):
        await run.at_step()
        await run.until(lambda run=run: status(run)["state"] == "running")
        run.process.send_signal(number)
        run.process.wait(10)
    assert status(first)["state"] == "interrupted"
    await second.until(lambda: "last heard" in top(second, "--once")[1])


async def test_top_of_a_run_that_failed_says_why(started):
    run = started(workflow__steps=10_000)
    await run.at_step()
    run.named("trainer-0").kill()
    run.process.wait(20)
    found = status(run)
    assert found["state"] == "failed"
    assert "trainer-0 was killed by signal 9" in found["error"]
    code, text, _ = top(run)
    assert code == 1
    assert "!! ended by" in text
