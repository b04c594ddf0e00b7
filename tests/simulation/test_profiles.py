"""Times from what a run left."""

import json
import math

import pytest

from asyncflow_core import metrics
from asyncflow_core.errors import DataError
from asyncflow_core.flow.simulation.profiles import measured, read_profile
from asyncflow_core.flow.simulation.times import Times
from asyncflow_core.flow.working.costs import Costs

from .conftest import workload


def sums(*observations):
    costs = Costs()
    for seconds, second, third in observations:
        costs.add(seconds, second, third)
    return costs.sums


def step(tokens, busy_s, *, wait_s=0.5, other_s=0.25, publish_s=2.0, commit_s=1.0):
    return {
        metrics.RESPONSE_TOKENS_MEAN: tokens / 8 - 3,
        metrics.TRAINER_TOKENS: tokens,
        metrics.TRAINER_BUSY_S: busy_s,
        metrics.TRAINER_WAIT_S: wait_s,
        metrics.STEP_WALL_S: busy_s + wait_s + other_s + publish_s,
        metrics.WEIGHTS_PUBLISH_S: publish_s,
        metrics.WEIGHTS_STAGE_S: 3.0,
        metrics.WEIGHTS_COMMIT_S: commit_s,
        metrics.CHECKPOINT_SAVE_S: 0.0,
    }


def sample(batch, sequence, number, *counts, source=0):
    versions = [[version, count] for version, count in enumerate(counts)]
    key = f"{source}/0/{sequence}/{number}"
    return {"batch": batch, "key": key, "versions": versions}


SAMPLES = [
    sample(1, 4, 0, 5),
    sample(0, 3, 1, 2, 7),
    sample(0, 3, 0, 4),
    sample(None, 0, 0, 99, source=1),
    sample(0, 1, 0, 6),
]
WORK = {
    "rollout": {
        "costs": sums(*((0.1 * t + 0.01 * t * n, t, t * n) for t in (2, 9) for n in (1, 4)))
    },
    "reward": {"costs": sums((1.0, 2, 50), (2.0, 4, 70), (0.5, 1, 90))},
    "advantage": {"costs": sums((3.0, 1, 2), (4.0, 2, 1))},
}


def profile(ranks=1, *, steps=None, samples=SAMPLES, summary=None, preset="async"):
    work = workload(preset, **{"trainer.world_size": ranks})
    return read_profile(
        "runs/one",
        work.config,
        steps=[
            json.dumps({"version": version, **found})
            for version, found in enumerate(steps or [step(800, 4.0), step(400, 2.0)], 1)
        ],
        samples=map(json.dumps, samples),
        summary=json.dumps(summary or {"work": WORK}, indent=2),
        overlaps_export=False,
    )


def test_profile_says_what_services_took():
    found = Times.model_validate(measured([profile()]))
    assert found.lengths.groups == ((6,), (4, 9), (5,))
    assert found.lengths.prompt == pytest.approx(3.0)
    assert found.rollout.token_s == pytest.approx(0.1)
    assert found.rollout.token_row_s == pytest.approx(0.01)
    assert found.stages["reward"].row_s == pytest.approx(0.5)
    assert found.trainer.token_s == pytest.approx(0.005)
    assert found.trainer.step_s == pytest.approx(0.25)
    assert found.weights.model_dump() == {"export_s": 2.0, "stage_s": 3.0, "commit_s": 1.0}


def test_profiles_of_two_rank_counts_show_how_the_trainer_scales():
    one = profile(1)
    two = profile(2, steps=[step(800, 4.0 / math.sqrt(2)), step(400, 2.0 / math.sqrt(2))])
    found = Times.model_validate(measured([one, two])).trainer
    assert found.scaling == pytest.approx(0.5)
    for ranks, seconds in ((1, 4.0), (2, 4.0 / math.sqrt(2)), (4, 2.0)):
        assert 800 / ranks * found.rank_token_s(ranks) == pytest.approx(seconds)


def test_profile_leaves_out_the_first_steps():
    steps = [step(800, 40.0)] * 3 + [step(800, 4.0)] * 3
    later = [*SAMPLES, sample(3, 20, 0, 8), sample(3, 20, 1, 1)]
    found = profile(steps=steps, samples=later)
    assert (found.steps, found.groups) == (3, ((8, 1),))
    assert measured([found])["trainer"]["token_s"] == pytest.approx(0.005)


def test_profile_of_a_drain_takes_the_shortest_switch():
    steps = [step(800, 4.0, commit_s=seconds) for seconds in (7.0, 9.0, 0.5)]
    assert profile(preset="streaming", steps=steps).commit_s == 0.5
    assert profile(preset="async", steps=steps).commit_s == 7.0


@pytest.mark.parametrize(
    "changes", [{"samples": [SAMPLES[3]]}, {"summary": {"work": None}}, {"summary": {"steps": 3}}]
)
def test_profile_that_says_too_little_is_refused(changes):
    with pytest.raises(DataError, match=r"runs/one.* cannot be a profile"):
        profile(**changes)


def test_profile_of_damaged_files_names_file_and_line():
    work = workload()
    with pytest.raises(DataError, match=r"runs/one: metrics.jsonl, line 2"):
        read_profile(
            "runs/one",
            work.config,
            steps=["{}", "{"],
            samples=[],
            summary="{}",
            overlaps_export=False,
        )
