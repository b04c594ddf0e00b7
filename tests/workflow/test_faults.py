"""Every fault: noticed, by name, and no row lost or trained twice."""

import copy
import time

import pytest

from tests.workflow import faults
from tests.workflow.faults import FAULTS

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]

STEADY = {
    "workflow__steps": 40,
    "trainer__plugin": "misbehave",
    "trainer__options": {"step_s": 0.05},
    "rollout__options": {"token_s": 0.01},
    "rollout__sampling": {"max_new_tokens": 3},
}


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
async def test_fault(fault, broken, noticed):
    run = broken(fault.place, **copy.deepcopy({**STEADY, **fault.settings}))
    begun = seconds = None
    if fault.inject is not None:
        await run.at_step(fault.at_step)
        begun = time.monotonic()
        await fault.inject(run)
        if fault.inject is faults.kill_at_random:
            begun = None  # the first of many
    elif fault.begins:
        begun = await run.begins(fault.begins)
    if fault.sign:
        said = await run.says(fault.sign)
        seconds = None if begun is None else said - begun
    await _happens(fault, run)
    noticed[fault.name] = seconds


async def _happens(fault, run):
    if fault.happens in (faults.ENDS, faults.RESUMES) or "run ends" in fault.happens:
        await run.over(1)
        assert fault.sign in run.output
    elif fault.inject is faults.kill_the_run:
        await run.over(-9)
    else:
        summary = await run.finished()
        failed = [row for row in run.samples() if row.get("reward_error")]
        assert summary["reward_errors"] == len(failed)
        if fault.happens == faults.UNHARMED:
            assert summary["restarts"] == {}
        elif fault.happens in (faults.RESTARTED, faults.GIVEN_UP):
            assert summary["restarts"]
        if fault.happens == faults.GIVEN_UP:
            assert {row["prompt"] for row in failed} == {"c"}
        elif "raises" not in fault.name:
            assert not failed
    if "--resume" in fault.happens:
        await run.completed_by_resume(6)
