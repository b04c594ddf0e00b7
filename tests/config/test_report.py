"""What `asyncflow report` makes of what a run left, whole and damaged."""

import dataclasses
import json
import os
import re
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow_core.cli.report.facts import trend
from asyncflow_core.cli.report.page import MARK
from asyncflow_core.flow.running.results import Summary
from asyncflow_core.flow.running.status import Staleness, Status, Tokens, WorkerStatus

from .conftest import BASE

STEPS = 20
STATUS = Status(
    run="mine",
    preset="async",
    state="finished",
    pid=7,
    host="here",
    time=2000.0,
    elapsed_s=75.0,
    every_s=1.0,
    version=STEPS,
    steps=STEPS,
    scores=[(0, 0.125), (STEPS, 0.75)],
    workers=[
        WorkerStatus("rollout-0", "rollout", 0.2, 0.1, 300, version=3),
        WorkerStatus("reward-0", "reward", 0.95, 0.0, 300),
        WorkerStatus("trainer-0", "train", 0.0, 0.0, 400),
    ],
    staleness=Staleness(2, {0: 40, 1: 120}),
    tokens=Tokens(generated=9, trained=9),
)
SUMMARY = Summary(
    name="mine",
    seed=0,
    eval_before=0.125,
    eval_after=0.75,
    steps=STEPS,
    wall_s=40.0,
    total_s=61.0,
    tokens_per_s=50.0,
    max_staleness_allowed=2,
    max_staleness_trained=1,
    mean_staleness_trained=0.75,
    max_staleness_updates=1,
    rows_put=170,
    rows_trained=160,
    rows_evaluated=16,
    reward_errors=0,
    busy_rollout=0.3,
    busy_trainer=0.5,
    rows_dropped_by_reason={"refused by the engine": 10},
    tokens_generated=1000,
    tokens_trained=900,
    tokens_evaluated=60,
    tokens_wasted_by_reason={"straggler": 30, "died": 10},
    restarts={"rollout-1": 2},
)


def step(version, **more):
    """Two seconds a step: one trained, half a second waited."""
    figures = {
        "reward/mean": version / STEPS,
        "reward/std": 0.5,
        "reward/errors": 0.0,
        "staleness/mean": 0.75,
        "staleness/max": 1.0,
        "staleness/updates_max": 1.0,
        "trainer/wait_s": 0.5,
        "trainer/busy_s": 1.0,
        "trainer/tokens": 100.0,
        "trainer/loss": 0.1,
        "flow/step_wall_s": 2.0,
        "weights/publish_s": 0.25 if version == 3 else 0.125,
        "weights/bytes": 1024.0,
        "checkpoint/save_s": 0.0,
    }
    return {"version": version, "life": 0, **figures, **more}


def sample(number, reward, *, batch=STEPS - 1, **more):
    return {
        "key": f"0/0/{number}/0",
        "batch": batch,
        "prompt": f"prompt {number}",
        "response": f"response {number}",
        "reward": reward,
        "versions": [[3, 2], [4, 5]],
        "finish_reason": "stop",
        **more,
    }


SAMPLES = [
    *(sample(0, 0.5, batch=0), sample(1, 1.0), sample(2, -1.0), sample(3, 1.0), sample(4, 0.0)),
    sample(5, 9.0, batch=None),
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Write a run of these parts into runs/mine; None leaves a file out."""
    monkeypatch.chdir(tmp_path)

    def call(*, status=STATUS, summary=SUMMARY, steps=None, samples=SAMPLES, evaluations=()):
        folder = tmp_path / "runs" / "mine"
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "logs" / "trainer-0.log").touch()
        (folder / "environment.json").write_text("{}")
        (folder / "config.yaml").write_text(BASE)
        if status is not None:
            (folder / "status.json").write_bytes(status.to_json())
        if summary is not None:
            (folder / "summary.json").write_text(json.dumps(dataclasses.asdict(summary)))
        records = {
            "metrics.jsonl": [step(v) for v in range(1, STEPS + 1)] if steps is None else steps,
            "samples.jsonl": samples,
            "evaluations.jsonl": evaluations,
        }
        for name, found in records.items():
            if found:
                (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in found))
        return folder

    return call


@pytest.fixture
def found(command):
    """The report of runs/mine as JSON."""

    def call(status=0):
        got, out, _ = command("report", "mine", "--json")
        assert got == status
        return json.loads(out)

    return call


def test_report_of_a_finished_run_tells_what_its_files_say(run, found):
    run(evaluations=[{"eval/version": 0.0, "eval/score": 0.125, "eval/rows": 8.0}])
    report = found()
    learning, times = report["learning"], report["times"]
    assert (report["state"], report["version"], report["steps"]) == ("finished", STEPS, STEPS)
    reward = learning["reward"]
    assert (reward["first"], reward["last"], reward["steps"]) == (0.05, 1.0, 2)
    assert reward["begin"] == pytest.approx(0.075)
    assert reward["end"] == pytest.approx(0.975)
    assert reward["word"] == "rose"
    assert [(s["version"], s["score"], s["rows"]) for s in learning["scores"]] == [
        (0, 0.125, 8),
        (STEPS, 0.75, 0),
    ]
    assert times["parts"] == {"trains": 0.5, "waits for rows": 0.25, "saves": 0, "between": 0.25}
    assert times["tokens_per_s"] == 50.0
    assert report["staleness"]["rows"] == {"0": 40, "1": 120}
    assert report["staleness"]["mean"] == 0.75
    assert report["tokens"]["wasted"] == {"straggler": 30, "died": 10}
    assert report["dropped"] == {"refused by the engine": 10}
    assert report["restarts"] == {"rollout-1": 2}
    weights = report["weights"]
    assert (weights["published"], weights["nbytes"]) == (STEPS, 1024)
    assert (weights["publish"]["largest"], weights["publish"]["at"]) == (0.25, 3)
    assert report["notes"] == []
    assert report["warnings"] == ["2 times a process was started again; their logs say why"]


def test_report_shows_the_best_the_worst_and_the_last_training_row_and_the_latest_of_equals(
    run, found
):
    run()
    chosen = found()["samples"]["chosen"]
    assert {why: row["key"] for why, row in chosen.items()} == {
        "best": "0/0/3/0",
        "worst": "0/0/2/0",
        "last": "0/0/4/0",
    }
    assert (chosen["last"]["tokens"], chosen["last"]["oldest"], chosen["last"]["newest"]) == (
        *(7, 3),
        4,
    )
    assert found()["samples"]["finish"] == {"stop": 4}


def test_report_text_has_the_answers(run, command):
    run()
    status, out, err = command("report", "mine")
    assert (status, err) == (0, "")
    for part in (
        "run mine: finished, async, 20 of 20 steps in 1:01",
        "reward: 0.050 in the first step, 1.000 in the last; mean of 2 steps 0.075",
        "v0 0.125, v20 0.750",
        "the trainer: trains 50%, waits for rows 25%, between 25%",
        "staleness of trained rows: mean 0.75, max 1, bound 2",
        "   1       120  75%  ###############",
        "wasted (4.0%): straggler 30, died 10",
        "rows dropped: refused by the engine 10",
        "started again: rollout-1 2",
        "weights: 20 versions",
        "publish  131 ms on average, at most 250 ms (step 3)",
        "worst: reward -1, batch 19, 7 tokens of version 3 to 4, ended by stop",
        'response "response 2"',
    ):
        assert part in out, part


@pytest.mark.parametrize("after_s", [1.0, 60.0])
def test_bottleneck_is_a_stage_only_where_the_last_seconds_were_training(run, found, after_s):
    folder = run()
    written = STATUS.time - after_s
    os.utime(folder / "metrics.jsonl", (written, written))
    assert (found()["times"]["bottleneck"]["what"] == "reward") == (after_s < 10)


def test_report_of_a_run_that_goes_on_and_of_one_that_was_killed(run, command):
    run(status=dataclasses.replace(STATUS, state="running", time=2e9 * 10), summary=None)
    status, out, _ = command("report", "mine")
    assert (status, out.splitlines()[0]) == (0, "run mine: running, async, 20 of 20 steps in 1:15")
    run(status=dataclasses.replace(STATUS, state="running"), summary=None)
    status, out, _ = command("report", "mine")
    assert status == 0
    assert re.search("!! last heard [0-9:]+ ago: the run's process is stopped or gone", out)


def test_report_of_a_resumed_run_says_which_time_its_seconds_are_of(run, command):
    run(steps=[step(1), step(2, life=3)])
    assert "20 of 20 steps, resumed 3x, the last life in 1:01\n" in command("report", "mine")[1]


def test_report_of_a_failed_run_has_status_1_and_says_why(run, command):
    error = "PeerLostError: trainer-0 died\nlast lines of its log"
    run(status=dataclasses.replace(STATUS, state="failed", error=error), summary=None)
    status, out, _ = command("report", "mine", "--out", "r.html")
    assert status == 1
    assert "!! ended by PeerLostError: trainer-0 died\n" in out
    assert "runs/mine/logs/ (trainer-0.log)" in out
    assert "last lines of its log" in Path("r.html").read_text()


def test_report_of_a_run_without_steps(run, command):
    starting = Status("mine", "async", "interrupted", 7, "here", 1.0, 2.0, 1.0, 0, 9)
    run(status=starting, summary=None, steps=[], samples=[])
    status, out, _ = command("report", "mine", "--out", "r.html")
    assert status == 0
    assert "run mine: interrupted, async, 0 of 9 steps in 0:02" in out
    assert "no step was recorded" in out
    assert "<svg" not in Path("r.html").read_text()


def test_report_of_a_run_that_left_next_to_nothing(run, command):
    folder = run(status=None, summary=None, steps=[], samples=[])
    (folder / "config.yaml").unlink()
    status, out, _ = command("report", "mine", "--out", "r.html")
    assert status == 0
    assert "run mine: unknown, 0 of 0 steps" in out
    assert "status.json is not there" in out
    assert "config.yaml cannot be read" in out


def test_staleness_without_a_known_bound_accuses_nobody(run, command, found):
    (run(status=None, summary=None) / "config.yaml").unlink()
    assert found()["staleness"]["bound"] is None
    assert found()["warnings"] == []
    status, out, _ = command("report", "mine", "--out", "r.html")
    assert status == 0
    assert "mean 0.75, max 1, bound not known" in out


def test_staleness_above_its_bound_is_told(run, found):
    run(steps=[step(1, **{"staleness/max": 3.0})])
    assert any("staleness 3 was trained, above the bound of 2" in w for w in found()["warnings"])


def test_damaged_lines_are_named_and_the_others_are_read(run, command, found):
    folder = run()
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"{\n[1]\n" + b"[" * 100_000 + b'\n{"version": -1}\n{"version": 21, "rewa')
    with (folder / "samples.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n{"key": 1}\n')
    report = found()
    assert report["version"] == STEPS
    assert report["samples"]["read"] == len(SAMPLES)
    whole, cut, samples = sorted(report["notes"])
    assert "damaged lines of metrics.jsonl were left out: line 21 (" in whole
    assert "and 3 more" in whole
    assert "damaged lines of samples.jsonl were left out: line 7 (" in cut
    assert "the last line of metrics.jsonl is not whole" in samples
    assert "not read: damaged lines" in command("report", "mine")[1]


@pytest.mark.parametrize("name", ["status.json", "summary.json", "config.yaml"])
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"run": NaN}', "[" * 600])
def test_damaged_file_is_named_and_the_others_are_read(run, found, name, text):
    (run() / name).write_text(text)
    report = found()
    assert any(note.startswith(f"{name} cannot be read") for note in report["notes"])
    assert report["learning"]["reward"]["last"] == 1.0
    assert report["staleness"]["largest"] == 1


def test_figures_that_are_not_finite_are_told_and_bear_no_arithmetic(run, found):
    steps = [step(1), step(2, **{"trainer/loss": None}), step(3, **{"trainer/loss": None})]
    steps.append(step(4, **{"reward/mean": float("inf")}))
    run(steps=steps)
    report = found()
    warned = [line for line in report["warnings"] if "no finite number" in line]
    assert warned == ["no finite number in 3 steps, first in step 2: trainer/loss"]
    assert report["learning"]["reward"]["last"] == 3 / STEPS


def test_rewards_that_failed_or_teach_nothing_are_told(run, found):
    failing = [sample(1, 0.0, reward_error="ValueError: no number"), *SAMPLES]
    run(
        steps=[step(v, **{"reward/std": 0.0, "reward/errors": 2.0}) for v in (1, 2)],
        samples=failing,
    )
    report = found()
    assert report["learning"]["errors"] == 4
    assert report["learning"]["causes"] == {"ValueError: no number": 1}
    assert any("all rewards of the last 2 steps were equal" in w for w in report["warnings"])
    assert any("4 rewards failed and count 0: ValueError" in w for w in report["warnings"])


def test_of_many_samples_the_end_is_read(run, found, monkeypatch):
    monkeypatch.setattr("asyncflow_core.cli.report.reading._TAIL_BYTES", 1000)
    run(samples=[sample(n, 0.0) for n in range(100)])
    samples = found()["samples"]
    assert not samples["complete"]
    assert 3 < samples["read"] < 10
    assert samples["chosen"]["best, worst, last"]["key"] == "0/0/99/0"
    assert found()["notes"] == []


NASTY = "</pre><script>alert(1)</script>\x1b[2J\x9b31m\u202e\ud800\x00" + "long " * 2000


def test_texts_of_a_run_move_no_terminal_and_run_no_script(run, command):
    run(samples=[sample(1, 1.0, prompt=NASTY, response=NASTY, finish_reason=NASTY)])
    status, out, _ = command("report", "mine", "--out", "r.html")
    assert status == 0
    assert all(line.isprintable() and len(line) <= 79 for line in out.splitlines())
    page = Path("r.html").read_text("utf-8")
    assert "&lt;script&gt;alert(1)" in page
    assert all(c.isprintable() or c in "\n\t" for c in page)


def test_page_needs_no_network_and_no_script(run, command):
    run()
    assert command("report", "mine", "--out", "r.html")[0] == 0
    page = Path("r.html").read_text("utf-8")
    assert page.startswith(MARK)
    assert "default-src 'none'" in page
    assert not re.search(r"<script|<link|<img|\bsrc=|href=|url\(|@import|//\w", page)
    for title in ("Reward", "Held-out score", "trainer/loss", "Seconds of a step", "Staleness"):
        assert f"<figcaption>{title}" in page


def test_page_shows_the_configuration_without_its_secrets(run, command):
    folder = run()
    text = BASE.replace("evaluation: null", "data_store: {plugin: zmq, options: {token: s3cret}}")
    (folder / "config.yaml").write_text(text)
    assert command("report", "mine", "--out", "r.html")[0] == 0
    page = Path("r.html").read_text("utf-8")
    assert "s3cret" not in page
    assert "token: (not shown)" in page
    assert "max_new_tokens: 1" in page


def test_out_replaces_a_report_and_nothing_else(run, command, tmp_path):
    run()
    for name, text in (("mine.txt", "keep me"), ("empty", ""), ("folder", None)):
        path = tmp_path / name
        path.mkdir() if text is None else path.write_text(text)
        status, out, err = command("report", "mine", "--out", name)
        assert (status, out) == (2, "")
        assert f"'{name}' is there and is no report" in err
        assert text is None or path.read_text() == text
    assert command("report", "mine", "--out", "r.html")[0] == 0
    first = Path("r.html").read_text()
    assert command("report", "mine", "--out", "r.html")[0] == 0
    assert Path("r.html").read_text() == first
    status, _, err = command("report", "mine", "--out", "nowhere/r.html")
    assert status == 2
    assert "cannot be written: No such file or directory" in err
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


@pytest.mark.parametrize("how", ["mine", "runs/mine", "runs/mine/"])
def test_report_finds_a_run_by_name_and_by_folder(run, command, how):
    run()
    assert command("report", how)[0] == 0


def test_report_of_no_run_says_where_it_looked(run, command):
    run()
    status, _, err = command("report", "yours")
    assert status == 2
    assert "neither yours/environment.json nor runs/yours/environment.json is there" in err


values = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60)


@given(values)
def test_trend_of_the_opposite_is_the_opposite(found):
    one, other = trend(found), trend([-value for value in found])
    opposite = {"rose": "fell", "fell": "rose"}
    assert other.word == opposite.get(one.word, one.word)
    assert (one.first, one.last) == (found[0], found[-1])
    assert min(found) - 1 <= one.begin <= max(found) + 1
    assert (one.error is None) == (len(found) < 15)


@given(st.integers(20, 60), st.floats(-10, 10))
def test_trend_of_what_stays_equal_is_no_change(number, value):
    assert trend([value] * number).word == "did not change for sure"


def test_trend_weighs_a_change_against_the_noise():
    noise = [0.1 * (-1) ** n for n in range(40)]
    assert trend([0.5 + wobble for wobble in noise]).word == "did not change for sure"
    risen = trend([0.5 + wobble + 0.02 * n for n, wobble in enumerate(noise)])
    assert risen.word == "rose"
    parts = [statistics.variance([0.5 + noise[n] + 0.02 * n for n in some]) for some in ROWS]
    assert risen.error == pytest.approx((sum(parts) / 4) ** 0.5)


ROWS = (range(4), range(36, 40))
