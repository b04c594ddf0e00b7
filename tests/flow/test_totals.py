"""What is counted of steps."""

from asyncflow_core import metrics
from asyncflow_core.batch import Key
from asyncflow_core.config import RunConfig
from asyncflow_core.flow.processes.control import StepReport
from asyncflow_core.flow.running.record import Rewards
from asyncflow_core.flow.running.status import Tokens
from asyncflow_core.flow.running.totals import Totals


def test_step_whose_rows_were_all_masked_counts_without_a_trained_one():
    report = StepReport(
        version=1,
        rows=0,
        groups=1,
        tokens=0,
        updates=1,
        staleness_rows={},
        staleness_updates_max=0,
        wait_s=0.0,
        busy_s=0.0,
        commit_s=0.0,
        rows_masked=2,
        tokens_too_stale=9,
    )
    seen = {Key(0, 0, 0, 0), Key(0, 0, 0, 1)}
    totals = Totals(wall_s=1.0, total_s=2.0)
    found = totals.add(report, Rewards(seen=seen, values=[0.0, 1.0], tokens=9))
    assert found[metrics.REWARD_MEAN] == 0.5
    assert found[metrics.STALENESS_MEAN] == 0.0
    part = {"plugin": "any"}
    config = RunConfig(
        **dict.fromkeys(("prompts", "rollout", "trainer", "loss"), part),
        stages={},
        workflow={"steps": 1, "groups_per_step": 1, "group_size": 2},
    )
    summary = totals.summary(config, {}, Tokens())
    assert (summary.wall_s, summary.total_s) == (1.0, 2.0)
    assert (summary.rows_trained, summary.rows_masked) == (0, 2)
    assert summary.mean_staleness_trained == 0.0
    assert summary.tokens_wasted_by_reason == {}
