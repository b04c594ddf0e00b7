"""Ctrl-C and SIGTERM, at any moment: every process, socket and file of shared memory goes."""

import os
import signal

import pytest

pytestmark = pytest.mark.multiproc

LONG = {"workflow__steps": 10_000}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_signal_to_the_process_ends_everything(started, number):
    run = started(**LONG)
    await run.at_step()
    os.kill(run.process.pid, number)
    await run.ended(f"{number.name} to the process", status=130)
    assert "interrupted; every process of the run was ended" in run.output
    assert "Traceback" not in run.output
    assert "--resume" not in run.output


async def test_interrupt_of_a_run_with_a_checkpoint_says_how_to_go_on(started):
    run = started(**LONG, checkpoint__every=2)
    await run.at_step(3)
    os.kill(run.process.pid, signal.SIGTERM)
    await run.ended("SIGTERM with a checkpoint", status=130)
    step = max(int(path.name) for path in (run.folder / "checkpoints").glob("[0-9]*"))
    said = f"asyncflow: `asyncflow run --resume {run.folder}` goes on from step {step}\n"
    assert run.output.endswith(
        f"asyncflow: interrupted; every process of the run was ended\n{said}"
    )


async def test_ctrl_c_as_a_terminal_does_it_ends_everything(started):
    run = started(**LONG)
    await run.at_step()
    os.killpg(run.process.pid, signal.SIGINT)
    await run.ended("SIGINT to the process group", status=130)
    for log in (run.folder / "logs").iterdir():
        assert "Traceback" not in log.read_text()


async def test_ctrl_c_twice_ends_everything(started):
    run = started(**LONG)
    await run.at_step()
    os.killpg(run.process.pid, signal.SIGINT)
    os.killpg(run.process.pid, signal.SIGINT)
    await run.ended("two SIGINT at once", status=130)


async def test_ctrl_c_again_while_a_child_resists_ends_everything(started):
    run = started(**LONG)
    await run.at_step()
    run.named("rollout-0").suspend()
    os.killpg(run.process.pid, signal.SIGINT)
    await run.without("trainer-0")
    os.killpg(run.process.pid, signal.SIGINT)
    await run.ended("a second SIGINT with a stopped child", status=130)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signal_during_start_up_ends_everything(started, number):
    run = started(rollout__plugin="misbehave", rollout__options={"at_open": "load"})
    await run.with_process("rollout-0")
    os.killpg(run.process.pid, number)
    await run.ended(f"{number.name} during start-up", status=130)
    assert "Traceback" not in run.output


async def test_ctrl_c_ends_children_that_resist_and_their_own(started):
    run = started(
        **LONG,
        rollout__plugin="misbehave",
        rollout__options={"at_open": "children", "at_generate": "native"},
    )
    await run.with_process("rollout-0", "trainer-0")
    await run.until(lambda: "now: native" in run.log("rollout-0") and sleeping(run) == 2)
    os.killpg(run.process.pid, signal.SIGINT)
    await run.ended("SIGINT with a child in native code", status=130)


async def test_ctrl_c_ends_a_stage_that_never_returns(started):
    """It runs on a thread of the run's own process, which nobody can end."""
    run = started(**LONG, stages__reward={"plugin": "misbehave"})
    await run.with_process("rollout-0")
    await run.until(lambda: "now: hangs" in run.output)
    os.killpg(run.process.pid, signal.SIGINT)
    await run.ended("SIGINT with a stage that never returns", status=130)


def sleeping(run):
    return sum(process.name() == "sleep" for process in run.processes())
