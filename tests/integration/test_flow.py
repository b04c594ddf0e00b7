"""`Flow` from Python: early ends, functions as stages, refusals."""

import asyncio
import json
import os
import threading
from pathlib import Path

import psutil
import pytest

import asyncflow_core as af
from asyncflow_core.errors import ConfigError, DataError, ServiceClosedError, ServiceError
from asyncflow_core.testing.aio import eventually

pytestmark = pytest.mark.multiproc

LONG = {"workflow__steps": 10_000}


def children():
    return [p for p in psutil.Process().children() if serves(p)]


def serves(process):
    try:
        return "--spec" in process.cmdline()
    except psutil.Error:
        return False


def run_dirs():
    """Of this process: it holds their locks."""
    opened = (os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink())
    return [path for path in opened if path.startswith("/dev/shm/asyncflow-")]


def write_prompts(path, letters):
    path.write_text("".join(json.dumps({"prompt": letter}) + "\n" for letter in letters))
    return path


async def test_on_start_of_a_stream_comes_before_the_first_step(inline):
    flow, seen = af.Flow(**inline(workflow__steps=1)), []
    async for step in flow.stream(on_start=lambda: seen.append(flow.folder.is_dir())):
        assert (seen, step.version) == ([True], 1)
    assert seen == [True]


def test_on_start_that_raises_ends_the_run_and_leaves_the_name(inline):
    def refuse():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(af.Flow(**inline(workflow__steps=1)).run(on_start=refuse))
    assert len(list(af.Flow(**inline(workflow__steps=1)).run())) == 1


async def assert_all_gone():
    await eventually(lambda: not children() and not run_dirs(), timeout_s=5)
    await eventually(
        lambda: not [t for t in threading.enumerate() if t.name == "asyncflow"], timeout_s=5
    )


@pytest.fixture
def processes(settings, monkeypatch):
    """As `settings`, for a run of processes started from here."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here / "misbehave")]))
    monkeypatch.syspath_prepend(str(here))
    return settings


async def test_break_ends_the_run(processes):
    flow = af.Flow(**processes(**LONG))
    for _ in flow.run():
        assert len(children()) == 4
        assert run_dirs()
        break
    await assert_all_gone()
    with pytest.raises(ServiceClosedError, match="no summary"):
        _ = flow.summary


async def test_exception_in_the_loop_body_ends_the_run(processes):
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        for step in af.Flow(**processes(**LONG)).run():
            _ = step.version / 0
    await assert_all_gone()


async def test_stream_ends_with_a_break_an_exception_a_cancellation(inline, processes):
    async for _ in af.Flow(**processes(**LONG)).stream():
        break
    await assert_all_gone()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async for step in af.Flow(**processes(**LONG)).stream():
            _ = step.version / 0
    await assert_all_gone()

    seen = asyncio.Event()

    async def consume():
        async for _ in af.Flow(**inline(**LONG)).stream():
            seen.set()

    task = asyncio.create_task(consume())
    await seen.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_all_gone()


async def test_stream_yields_every_step_in_the_users_own_loop(inline):
    flow = af.Flow(**inline())
    assert [step.version async for step in flow.stream()] == [1, 2, 3, 4]
    assert flow.summary.steps == 4


def test_a_flow_runs_once_and_tells_nothing_before(inline):
    flow = af.Flow(**inline(workflow__steps=1))
    with pytest.raises(ServiceClosedError, match="not been started"):
        _ = flow.folder
    with pytest.raises(ServiceClosedError, match="no summary"):
        _ = flow.summary
    assert [step.version for step in flow.run()] == [1]
    with pytest.raises(ServiceClosedError, match="runs once"):
        list(flow.run())


def test_a_run_moves_an_earlier_one_of_its_name_aside(inline):
    flows, seen = [af.Flow(**inline(workflow__steps=1)) for _ in range(2)], []
    with pytest.raises(ServiceClosedError, match="not been started"):
        _ = flows[0].moved_to
    for flow in flows:
        list(flow.run(on_start=lambda flow=flow: seen.append((flow.folder, flow.moved_to))))
    folder = flows[0].folder
    assert seen == [(folder, None), (folder, folder.with_name("small-1"))]
    assert {p.name for p in flow.folder.parent.iterdir()} == {"small", "small-1"}


def test_python_functions_run_in_threads_of_this_process(inline):
    threads = set()

    def judge(response: str, prompt: str) -> float:
        threads.add(threading.current_thread().name)
        return float(response > prompt)

    def halves(batch):
        threads.add(threading.current_thread().name)
        rewards, lengths = batch["reward"], batch["response_ids"].lengths
        return {"advantages": [[r - 0.5] * n for r, n in zip(rewards, lengths, strict=True)]}

    tree = inline()
    tree["stages"] = {
        "judge": af.reward(judge, workers=2),
        "advantage": af.stage(halves, reads=["reward", "response_ids"], writes=["advantages"]),
    }
    flow = af.Flow(**tree)
    list(flow.run())
    assert any(name.startswith("judge-") for name in threads)
    assert any(name.startswith("advantage-0") for name in threads)
    assert "test_flow:" in (flow.folder / "config.yaml").read_text()


def test_reward_that_raises_scores_0_and_is_counted_and_shown(inline, caplog):
    reward = {"function": "functions:raises_for_c", "kind": "reward"}
    flow = af.Flow(**inline(stages__reward=reward))
    steps = list(flow.run())
    samples = [json.loads(s) for s in (flow.folder / "samples.jsonl").read_text().splitlines()]
    failed = [sample for sample in samples if "reward_error" in sample]
    assert len(failed) == flow.summary.reward_errors > 0
    assert all(sample["prompt"] == "c" and sample["reward"] == 0 for sample in failed)
    assert sum(step.metrics["reward/errors"] for step in steps) == len(failed)
    assert [r.getMessage() for r in caplog.records if "cannot judge" in r.getMessage()] == [
        f"a reward failed and counts 0: {failed[0]['reward_error']}"
    ]


def test_step_whose_rewards_all_failed_ends_the_run_by_function_and_first_error(inline):
    reward = {"function": "functions:raises", "kind": "reward"}
    flow = af.Flow(**inline(stages__reward=reward))
    with pytest.raises(ServiceError) as caught:
        list(flow.run())
    first = json.loads((flow.folder / "samples.jsonl").read_text().splitlines()[0])
    assert (
        "all 16 rewards of step 1 failed, so it learned nothing; the first of stage 'reward' "
        f"(functions:raises): {first['reward_error']}; mend it"
    ) in str(caught.value)
    assert caught.value.service == "reward"
    assert json.loads((flow.folder / "status.json").read_text())["state"] == "failed"
    assert not (flow.folder / "summary.json").exists()


def test_rewards_that_all_fail_end_a_run_with_dynamic_sampling_by_their_error(inline):
    reward = {"function": "functions:raises", "kind": "reward"}
    flow = af.Flow(**inline(stages__reward=reward, workflow__dynamic_sampling=True))
    with pytest.raises(ServiceError, match="the last: all rewards failed: ValueError: cannot ju"):
        list(flow.run())


def test_held_out_rewards_that_all_fail_are_counted_and_make_no_score(inline, tmp_path, caplog):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "c"}\n')
    flow = af.Flow(
        **inline(
            stages__reward={"function": "functions:raises_for_c", "kind": "reward"},
            evaluation={"samples": 2},
            prompts__options__path=str(write_prompts(tmp_path / "others.jsonl", "abdefgh")),
            prompts__options__evaluation_path=str(held_out),
        )
    )
    list(flow.run())
    summary = flow.summary
    assert summary.reward_errors == summary.rows_evaluated == 4
    assert (summary.eval_before, summary.eval_after, summary.eval_scores) == (None, None, {})
    assert "rewards of the evaluation of version 0 failed and count 0, the first: V" in caplog.text


def test_stage_that_returns_wrong_columns_ends_the_run_by_name(inline):
    tree = inline(stages__advantage__function="functions:wrong_columns")
    with pytest.raises(DataError, match="stage 'advantage-0' must return the columns"):
        list(af.Flow(**tree).run())


def test_failure_keeps_its_cause(inline):
    tree = inline(trainer__plugin="misbehave", trainer__options={"at_step": "raise"})
    with pytest.raises(Exception, match="the engine broke") as caught:
        list(af.Flow(**tree).run())
    assert isinstance(caught.value, RuntimeError)
    tree = inline(trainer__plugin="misbehave", trainer__options={"at_step": "raise"})
    tree["trainer"]["world_size"] = 2
    with pytest.raises(ServiceError, match="trainer rank 1 of 2 failed in optim_step") as caught:
        list(af.Flow(**tree).run())
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_refused_prompt_is_dropped_and_replaced_in_its_batch(inline):
    tree = inline(
        rollout__plugin="misbehave",
        rollout__options={"at_generate": "refuse_one"},
        workflow__steps=6,
    )
    flow = af.Flow(**tree)
    list(flow.run())
    summary = flow.summary
    assert summary.rows_trained == 6 * 16
    ((reason, dropped),) = summary.rows_dropped_by_reason.items()
    assert reason == "refused by the engine"
    assert dropped >= 4
    assert summary.rows_put == summary.rows_trained + dropped
    samples = [json.loads(s) for s in (flow.folder / "samples.jsonl").read_text().splitlines()]
    assert len({s["prompt"] for s in samples}) == 11
    for batch in range(6):
        assert len([s for s in samples if s["batch"] == batch]) == 16


def test_engine_that_refuses_everything_ends_the_run(inline):
    tree = inline(rollout__plugin="misbehave", rollout__options={"at_generate": "refuse"})
    with pytest.raises(ServiceError, match=r"dropped within one step.*too long.*never end"):
        list(af.Flow(**tree).run())


def test_refused_held_out_prompts_are_counted_and_not_waited_for(inline, caplog):
    tree = inline(
        rollout__plugin="misbehave",
        rollout__options={"at_generate": "refuse"},
        prompts__options__evaluation_share=0.4,
    )
    with pytest.raises(ServiceError, match="dropped within one step"):  # training rows, too
        list(af.Flow(**tree).run())
    assert any("the evaluation of version 0 is over 0 of" in r.message for r in caplog.records)


def test_a_bad_plan_starts_nothing(inline):
    with pytest.raises(ConfigError):
        af.Flow(**inline(workflow__steps=0))
    assert not children()
