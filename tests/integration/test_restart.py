"""A replica or a stage that dies or is stuck comes back; nothing is lost, nothing comes twice."""

import signal

import pytest

pytestmark = pytest.mark.multiproc

STEADY = {
    "workflow__steps": 40,
    "trainer__plugin": "misbehave",
    "trainer__options": {"step_s": 0.05},
    "rollout__options": {"token_s": 0.01},
    "rollout__sampling": {"max_new_tokens": 3},
}


@pytest.mark.parametrize("name", ["rollout-0", "reward-0"])
async def test_killed_process_is_started_again_and_the_run_completes(started, name):
    run = started(**STEADY)
    await run.at_step(3)
    run.named(name).kill()
    summary = await run.finished()
    assert f"{name} was killed by signal 9 (SIGKILL)" in run.output
    assert "it is started again (restart 1)" in run.output
    assert summary["restarts"] == {name: 1}


async def test_stopped_process_counts_as_stuck_and_is_started_again(started):
    run = started(**STEADY, rollout__replicas=2, watchdog__stuck_s=4.0)
    await run.at_step(3)
    run.named("rollout-1").suspend()
    await run.until(lambda: "gave no sign of life for 4 s (watchdog.stuck_s)" in run.output)
    summary = await run.finished()
    assert summary["restarts"]["rollout-1"] == 1


async def test_stopped_trainer_ends_the_run_by_name(started):
    run = started(**{**STEADY, "workflow__steps": 10_000}, watchdog__stuck_s=4.0)
    await run.at_step(3)
    run.named("trainer-0").suspend()
    await run.until(lambda: run.process.poll() is not None)
    assert run.process.returncode == 1
    assert "peer_lost: trainer-0 gave no sign of life for 4 s" in run.output


async def test_process_that_dies_too_often_ends_the_run_by_name(started):
    run = started(**{**STEADY, "workflow__steps": 10_000}, watchdog__restarts=1)
    await run.at_step(3)
    first = run.named("reward-0")
    first.send_signal(signal.SIGKILL)
    await run.until(lambda: (second := run.named("reward-0")) and second.pid != first.pid)
    assert "restart 1" in run.output
    run.named("reward-0").send_signal(signal.SIGKILL)
    await run.until(lambda: run.process.poll() is not None)
    assert "peer_lost: reward-0 was started again 1 times within 600 s" in run.output
    assert "reward-0 was killed by signal 9 (SIGKILL)" in run.output


async def test_reward_that_never_returns_is_ended_and_its_rows_count_as_errors(started):
    run = started(
        stages__reward={
            "function": "functions:never_for_c",
            "kind": "reward",
            "rows": 8,
            "timeout_s": 1.0,
        },
        workflow__group_size=2,
        workflow__steps=2,
    )
    summary = await run.finished()
    failed = [row for row in run.samples() if row.get("reward_error")]
    assert {row["prompt"] for row in failed} == {"c"}
    assert all(row["reward"] == 0 and "did not return" in row["reward_error"] for row in failed)
    assert summary["reward_errors"] == len(failed) > 0
    others = [row for row in run.samples() if row["prompt"] != "c"]
    assert not any(row.get("reward_error") for row in others)


def hanging(how, **more):
    return {
        **STEADY,
        "rollout__plugin": "misbehave",
        "rollout__options": {"at_generate": how, "token_s": 0.01},
        "rollout__timeout_s": 2.0,
        **more,
    }


async def test_replica_whose_engine_hangs_is_ended_and_another_answers_its_rows(started):
    run = started(**hanging("hang_once"), rollout__replicas=2, workflow__preset="async")
    summary = await run.finished()
    assert "rows it holds for 2 s (rollout.timeout_s), so it was ended" in run.output
    assert sum(summary["restarts"].values()) == 1


@pytest.mark.slow
async def test_replica_that_hangs_each_time_ends_the_run_though_it_takes_longer_than_the_window(
    started,
):
    run = started(**hanging("hang", watchdog__restarts=1, watchdog__restart_window_s=0.5))
    await run.until(lambda: run.process.poll() is not None)
    assert run.process.returncode == 1
    assert "rollout-0 was started again 1 times in a row without progress in" in run.output
    assert "finished none of the" in run.output


async def test_engine_that_hangs_in_the_runs_own_process_ends_the_run(started):
    more = {"launcher__plugin": "inline", "weight_sync__plugin": "memory"}
    run = started(**hanging("hang", **more))
    await run.until(lambda: run.process.poll() is not None)
    assert run.process.returncode == 1
    assert "service: rollout-0 generated no token" in run.output
    assert "launcher.plugin=local" in run.output


async def test_trainer_that_dies_again_before_each_checkpoint_ends_the_run(started):
    run = started(
        trainer__plugin="misbehave",
        trainer__options={"at_step": "exit", "after_updates": 3},
        workflow__steps=10,
        checkpoint__every=2,
        watchdog={"on_trainer_death": "resume", "restarts": 1, "restart_window_s": 0.1},
    )
    await run.until(lambda: run.process.poll() is not None)
    assert run.process.returncode == 1
    assert run.output.count("the run goes on from its checkpoint of step 2") == 1
    said = "peer_lost: the run was resumed 1 times in a row without progress in between"
    assert f"{said} (watchdog.restarts), the last time from step 2" in run.output
    assert "trainer-0 ended with status 3" in run.output


@pytest.mark.parametrize("replicas", [1, 2])
async def test_replica_that_takes_no_more_weights_is_started_again_and_catches_up(
    started, replicas
):
    run = started(
        **{**STEADY, "rollout__options": {"token_s": 0.01, "refuses_from": 3}},
        rollout__plugin="misbehave",
        rollout__replicas=replicas,
    )
    summary = await run.finished()
    assert "cannot be brought to weights version" in run.output
    assert "no memory for a second set of weights, so it was ended; " in run.output
    assert sum(summary["restarts"].values()) == 1
