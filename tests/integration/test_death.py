"""However a process ends that may not come back, the run ends too, soon, and says which and why."""

import signal

import pytest

pytestmark = pytest.mark.multiproc

SLOW = {
    "workflow__steps": 10_000,
    "trainer__plugin": "misbehave",
    "trainer__options": {"step_s": 0.02},
    "watchdog__restarts": 0,
}


@pytest.mark.parametrize("name", ["rollout-0", "trainer-0", "trainer-1", "reward-1"])
async def test_killed_child_ends_the_run_with_its_name(started, name):
    run = started(**SLOW, trainer__world_size=2, stages__reward__workers=2)
    await run.at_step(2)
    run.named(name).kill()
    await run.ended(f"kill -9 of {name}", status=1)
    assert f"peer_lost: {name} was killed by signal 9 (SIGKILL)" in run.output
    assert f"last lines of {run.folder}/logs/{name}.log:" in run.output
    assert f"{name} serves" in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [("exit", "ended with status 3", ""), ("raise", "ended with status 1", "the engine broke")],
)
async def test_rollout_that_ends_by_itself_ends_the_run(started, how, status, words):
    run = started(
        rollout__plugin="misbehave", rollout__options={"at_generate": how}, watchdog__restarts=0
    )
    await run.without("rollout-0")
    await run.ended(f"rollout that does {how}", status=1)
    assert f"peer_lost: rollout-0 {status}" in run.output
    assert words in run.output


@pytest.mark.parametrize("how", ["exit", "raise"])
async def test_trainer_rank_that_fails_ends_the_run_by_number(started, how):
    run = started(
        trainer__plugin="misbehave", trainer__options={"at_step": how}, trainer__world_size=2
    )
    await run.without("trainer-1")
    await run.ended(f"trainer rank 1 that does {how}", status=1)
    if how == "exit":
        assert "peer_lost: trainer-1 ended with status 3" in run.output
    else:
        assert "trainer rank 1 of 2 failed in optim_step" in run.output
        assert "the engine broke" in run.output


@pytest.mark.parametrize("how", ["exit", "raise"])
async def test_child_that_fails_to_start_ends_the_run(started, how):
    run = started(
        rollout__plugin="misbehave",
        rollout__options={"at_open": how},
        trainer__plugin="misbehave",
        trainer__options={"at_open": "load"},
    )
    await run.without("rollout-0")
    await run.ended(f"start-up that does {how}", status=1)
    assert "peer_lost: rollout-0 ended with status" in run.output
    assert how == "exit" or "RuntimeError: the engine broke" in run.output


@pytest.mark.parametrize("name", ["rollout-0", "trainer-0", "reward-0"])
async def test_child_killed_while_others_load_ends_the_run(started, name):
    run = started(
        rollout__plugin="misbehave",
        rollout__options={"at_open": "load"},
        trainer__plugin="misbehave",
        trainer__options={"at_open": "load"},
    )
    await run.with_process("rollout-0", "trainer-0", "reward-0")
    run.named(name).send_signal(signal.SIGKILL)
    await run.ended(f"kill -9 of {name} while others load", status=1)
    assert f"peer_lost: {name} was killed by signal 9 (SIGKILL)" in run.output


async def test_child_that_does_not_come_up_ends_the_run_by_the_deadline_it_missed(started):
    run = started(
        rollout__plugin="misbehave",
        rollout__options={"at_open": "load"},
        launcher__options={"start_timeout_s": 4},
    )
    await run.with_process("rollout-0")
    await run.until(lambda: run.process.poll() is not None)
    assert run.process.returncode == 1
    said = "-0 did not answer within 4 s of its start (launcher.options.start_timeout_s); "
    assert said in run.output  # on a busy machine another one may be the first
