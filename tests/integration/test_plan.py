"""`asyncflow plan` from what a real run left."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multiproc


def plan(run, *flags):
    folder = run.folder
    said = subprocess.run(
        [
            *(sys.executable, "-m", "asyncflow_core.cli", "plan", folder / "config.yaml"),
            *("--profile", folder, *flags),
        ],
        capture_output=True,
        text=True,
        check=True,
        env=run.environment,
    )
    return json.loads(said.stdout)


async def test_plan_takes_a_finished_run_for_its_profile(started):
    run = started(workflow__steps=8, rollout__options={"token_s": 0.02})
    await run.finished()
    work = run.summary()["work"]
    assert set(work) == {"rollout", "reward", "advantage"}
    assert work["rollout"]["rows"] == work["rollout"]["costs"][0] >= 8 * 16
    found = plan(run, "--devices", "4", "--steps", "6", "--json")
    assert found["overrides"][0].startswith("rollout.replicas=")
    assert sum(found["times"]["rollout"].values()) > 0
    assert found["present"]["staleness_max"] <= 1
