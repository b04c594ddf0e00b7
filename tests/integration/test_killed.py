"""kill -9 of the run's own process: the guard ends what it started; nothing stays."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncflow_core.flow.processes.guard import MARK
from asyncflow_core.flow.processes.run_dir import RunDirectory

pytestmark = pytest.mark.multiproc

LONG = {"workflow__steps": 10_000}


async def test_killed_run_leaves_nothing(started):
    run = started(**LONG, rollout__plugin="misbehave", rollout__options={"at_open": "children"})
    await run.at_step()
    run.process.kill()
    await run.ended("kill -9 of the run", status=-9)


async def test_killed_run_leaves_no_stopped_child(started):
    run = started(**LONG, rollout__plugin="misbehave", rollout__options={"at_open": "children"})
    await run.at_step()
    run.named("rollout-0").suspend()
    run.named("trainer-0").suspend()
    run.process.kill()
    await run.ended("kill -9 of the run with stopped children", status=-9)


async def test_killed_run_leaves_no_child_in_native_code(started):
    run = started(**LONG, rollout__plugin="misbehave", rollout__options={"at_generate": "native"})
    await run.with_process("rollout-0", "trainer-0", "reward-0")
    await run.until(lambda: "now: native" in run.log("rollout-0"))
    run.process.kill()
    await run.ended("kill -9 of the run with a child in native code", status=-9)


async def test_killed_run_and_guard_leave_no_process_and_the_next_start_sweeps(started):
    run = started(**LONG)
    await run.at_step()
    run.named("guard").kill()
    run.process.kill()
    await run.until(lambda: not run.processes())
    (directory,) = run.run_dirs
    assert directory.exists()
    RunDirectory().remove()
    assert not directory.exists()


async def test_sweep_ends_stopped_children_of_a_dead_run(started):
    run = started(**LONG)
    await run.at_step()
    run.named("reward-0").suspend()
    run.named("guard").kill()
    run.process.kill()
    await run.until(lambda: len(run.processes()) == 1)
    RunDirectory().remove()
    await run.until(lambda: not run.processes())


def test_run_directory_is_private(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.remove()
    directory.remove()
    assert not list(tmp_path.iterdir())


def test_sweep_leaves_a_living_run_and_takes_a_dead_one(tmp_path):
    living = RunDirectory(tmp_path)
    code = (
        "import os, sys; from pathlib import Path;"
        "from asyncflow_core.flow.processes.run_dir import RunDirectory;"
        "print(RunDirectory(Path(sys.argv[1])).path, flush=True); os.kill(os.getpid(), 9)"
    )
    made = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    dead = Path(made.stdout.strip())
    assert dead.exists()
    next_one = RunDirectory(tmp_path)
    assert not dead.exists()
    assert {living.path, next_one.path} == set(tmp_path.iterdir())
    living.remove()
    next_one.remove()


def test_a_reused_process_id_is_not_trusted(tmp_path):
    """A name says nothing: only a lock says that a run lives."""
    (tmp_path / f"asyncflow-{os.getpid()}").mkdir()
    directory = RunDirectory(tmp_path)
    assert list(tmp_path.iterdir()) == [directory.path]
    directory.remove()


def test_sweep_follows_no_link(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "asyncflow-link").symlink_to(target)
    RunDirectory(tmp_path).remove()
    assert target.exists()


def test_marked_processes_of_another_run_are_left(tmp_path):
    from asyncflow_core.flow.processes.guard import end_marked

    mine, other = (
        subprocess.Popen(["sleep", "60"], env={MARK: f"{tmp_path}/{name}"})
        for name in ("mine", "mine2")
    )
    try:
        end_marked(f"{tmp_path}/mine")
        assert mine.wait(5) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (mine, other):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


async def test_two_runs_side_by_side_do_not_disturb_each_other(started):
    first, second = started(**LONG), started(**LONG)
    await first.at_step()
    await second.at_step()
    assert first.run_dirs.isdisjoint(second.run_dirs)
    first.process.kill()
    await first.ended("kill -9 of one of two runs", status=-9)
    await second.at_step(second.steps() + 2)
    assert all(directory.exists() for directory in second.run_dirs)


def test_guard_leaves_groups_alone_that_are_gone(tmp_path):
    from asyncflow_core.flow.processes import guard

    gone, mine = (subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(2))
    try:
        guard.main(str(tmp_path / "run"), [f"{gone.pid}\n", f"{mine.pid}\n", f"-{gone.pid}\n"])
        assert mine.wait(5) == -signal.SIGKILL
        assert gone.poll() is None
    finally:
        gone.kill()
        gone.wait()
