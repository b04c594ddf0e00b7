"""What `asyncflow plan` prints, from times by hand; and what it refuses."""

import json
import os

import pytest

from .conftest import BASE

TIMES = """\
lengths: {mean: 40, sigma: 0.5, longest: 100, prompt: 8}
rollout: {token_s: 0.01, token_row_s: 0.001}
stages:
  reward: {row_s: 0.01}
  advantage: {}
trainer: {token_s: 0.01, scaling: 0.9}
weights: {export_s: 0.1, stage_s: 0.1}
"""

TWO_RANKS = BASE.replace("plugin: tabular\n  options: {lr: 1.0}", "plugin: torchish").replace(
    "tabular_ppo_clip", "torchish"
)


@pytest.fixture
def times(folder):
    """A file of times by hand."""
    path = folder / "times.yaml"
    path.write_text(TIMES)
    return path


def test_plan_prints_a_table_and_overrides_to_paste(write, times, command, no_start):
    status, out, err = command("plan", write(TWO_RANKS), "--times", times, "--devices", "4")
    assert (status, err) == (0, "")
    assert "scaling 0.90" in out
    lines = out.splitlines()
    best = next(line.split() for line in lines if "<- best" in line)
    assert lines[-1] == f"  rollout.replicas={best[0]} trainer.world_size={best[1]}"
    assert "now" in out
    assert max(map(len, lines)) < 100


def test_plan_as_json_is_the_same_each_time_and_takes_overrides(write, times, command):
    ask = ("plan", write(TWO_RANKS), "rollout.rows_in_flight=4", "--times", times, "--devices", "4")
    _, first, _ = command(*ask, "--json", "--stage-workers", "reward=1,2")
    _, again, _ = command(*ask, "--json", "--stage-workers", "reward=1,2")
    assert first == again
    found = json.loads(first)
    assert found["devices"] == 4
    assert found["best"]["step_s"] <= found["present"]["step_s"]
    assert found["best"]["devices"] == found["best"]["replicas"] + found["best"]["trainer_ranks"]
    assert {c["trainer_ranks"] for c in found["simulated"]} <= {1, 2}, "this trainer has no more"
    assert {c["stage_workers"]["reward"] for c in found["simulated"]} <= {1, 2}
    assert found["best"]["staleness_max"] <= 1
    assert all(c["lower_bound_s"] <= c["step_s"] * 1.02 for c in found["simulated"])


def test_plan_says_what_it_leaves_out(write, times, command):
    text = BASE.replace("evaluation: null", "evaluation: {every: 1}")
    _, out, _ = command("plan", write(text), "--times", times)
    assert "not simulated: evaluation beside training" in out
    assert "memory is not looked at" in " ".join(out.split())


REFUSED = [
    ((), "--profile RUN, a finished run, or --times"),
    (("--profile", "nowhere"), "there is no run 'nowhere': neither nowhere/environment.json"),
    (("--times", "times.yaml", "--devices", "4", "--trainer-ranks", "0"), "--trainer-ranks takes"),
    (("--times", "times.yaml", "--stage-workers", "rewrad=2"), "the stages are reward, advantage"),
    (("--times", "times.yaml", "--stage-workers", "reward"), "--stage-workers reward takes"),
    (("--times", "times.yaml", "workflow.order=ready_first"), "plan with workflow.order=batches"),
    (("--times", "config.yaml"), "unknown key"),
]


@pytest.mark.parametrize(("arguments", "expected"), REFUSED)
def test_plan_refuses_in_words(arguments, expected, write, times, command, no_start):
    status, out, err = command("plan", write(), *arguments)
    assert (status, out) == (2, "")
    assert expected in err


def test_plan_refuses_more_ranks_than_the_trainer_can_have(write, times, command):
    ask = ("plan", write(TWO_RANKS), "--times", times, "--devices", "8")
    status, _, err = command(*ask, "--trainer-ranks", "4")
    assert status == 2
    assert "trainer plugin 'torchish' runs on at most 2 ranks" in err


def test_plan_times_that_are_wrong_are_named_by_file_and_line(write, times, command):
    times.write_text(TIMES.replace("0.01, token_row_s", "-1, token_row_s"))
    _, _, err = command("plan", write(), "--times", times)
    assert f"{times}:2: rollout.token_s: " in err
    times.write_text(TIMES.replace("  reward: {row_s: 0.01}\n", ""))
    _, _, err = command("plan", write(), "--times", times)
    assert "stages.reward: there are no times of this stage" in err


def test_plan_of_a_run_whose_files_are_damaged_names_the_line(folder, write, times, command):
    run = folder / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.yaml").write_bytes(write().read_bytes())
    for name in ("metrics.jsonl", "samples.jsonl"):
        (run / name).write_text("{}\n{\n")
    (run / "environment.json").write_text("{}")
    status, _, err = command("plan", folder / "config.yaml", "--profile", "mine")
    assert (status, "it has not finished" in err) == (2, True)
    (run / "summary.json").write_text("{}")
    status, _, err = command("plan", folder / "config.yaml", "--profile", "mine")
    assert status == 1
    assert f"runs{os.sep}mine: metrics.jsonl, line 2" in err
    (run / "metrics.jsonl").write_text('{"version": 1}')
    (run / "samples.jsonl").write_bytes(b"\xff")
    status, _, err = command("plan", folder / "config.yaml", "--profile", "mine")
    assert (status, "not as this release writes them" in err) == (1, True)
    (run / "samples.jsonl").unlink()
    status, _, err = command("plan", folder / "config.yaml", "--profile", "mine")
    assert (status, "samples.jsonl' cannot be read: No such file" in err) == (2, True)
