"""Resuming a run: inside this process, ended between steps or by an error."""

import contextlib
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncflow_core import Flow
from asyncflow_core.errors import ConfigError

pytestmark = pytest.mark.multiproc


def lines(folder, name):
    whole = (Path(folder) / name).read_text().rpartition("\n")[0]  # one may be on its way
    return [json.loads(line) for line in whole.splitlines()]


def weights(folder, version):
    path = Path(folder) / "checkpoints" / str(version) / "trainer"
    return {file.name: np.load(file) for file in sorted(path.glob("*.npy"))}


def stop_after(flow, step):
    """Leave the loop, which ends the run, once `step` is done."""
    for result in flow.run():
        if result.version >= step:
            return


def assert_equal_weights(first, second):
    assert first.keys() == second.keys()
    assert first
    for name in first:
        assert (first[name] == second[name]).all(), name


def assert_each_group_once(folder, steps, groups=4, samples=4):
    metrics, training = surviving(folder)
    assert [m["version"] for m in metrics] == list(range(1, steps + 1))
    keys = [s["key"] for s in training]
    assert len(set(keys)) == len(keys) == steps * groups * samples
    for step in metrics:
        rewards = [s["reward"] for s in training if s["batch"] == step["version"] - 1]
        assert len(rewards) == groups * samples
        assert step["reward/mean"] == pytest.approx(np.mean(rewards))


def surviving(folder):
    samples = lines(folder, "samples.jsonl")
    return lines(folder, "metrics.jsonl"), [s for s in samples if s["batch"] is not None]


SAVED = {"checkpoint": {"every": 2, "keep": 10, "resume": "exact"}, "evaluation": None}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"workflow__updates_per_step": 2, "trainer__micro_batch_tokens": 16},
        {"rollout__replicas": 2, "rollout__rows_in_flight": 3, "stages__reward__workers": 2},
    ],
)
def test_sequential_runs_with_one_seed_are_bit_equal(inline, changes):
    """Whatever the order in which responses end."""
    made = []
    sampling = {"max_new_tokens": 5}
    for number, slots in enumerate((64, 3)):
        options = {"slots": slots, "eos_token_id": 4, "token_s": 0.001 * number}
        changes |= {"rollout__options": options, "rollout__sampling": sampling}
        tree = inline(name=f"run-{number}", workflow__preset="sequential", **changes, **SAVED)
        flow = Flow(**tree)
        list(flow.run())
        made.append(weights(flow.folder, 4))
    assert_equal_weights(*made)


@pytest.mark.parametrize("stop", [2, 5])
def test_exact_resume_of_a_sequential_run_is_bit_equal_to_a_straight_one(inline, stop):
    changes = {"workflow__preset": "sequential", "workflow__steps": 8, **SAVED}
    straight = Flow(**inline(name="straight", **changes))
    list(straight.run())
    broken = Flow(**inline(name="broken", **changes))
    stop_after(broken, stop)
    resumed = Flow.resume(broken.folder)
    assert resumed.resumed_from == stop - stop % 2
    assert [r.version for r in resumed.run()] == list(range(resumed.resumed_from + 1, 9))
    assert_equal_weights(weights(straight.folder, 8), weights(resumed.folder, 8))
    assert_each_group_once(resumed.folder, 8)
    assert resumed.summary.rows_trained == 8 * 16
    lives = [m["life"] for m in lines(resumed.folder, "metrics.jsonl")]
    assert lives == [0] * resumed.resumed_from + [1] * (8 - resumed.resumed_from)


@pytest.mark.parametrize("bound", [0, 2])
def test_resume_of_an_async_run_trains_each_group_once(inline, bound):
    changes = {"workflow__max_staleness": bound, "workflow__steps": 9}
    broken = Flow(**inline(name="broken", **changes, checkpoint__every=3))
    stop_after(broken, 5)
    for stop in (6, 8, 9):
        broken = Flow.resume(broken.folder)
        stop_after(broken, stop)
    assert_each_group_once(broken.folder, 9)
    staleness = [s["batch"] - min(v for v, _ in s["versions"]) for s in surviving(broken.folder)[1]]
    assert max(staleness) <= bound


def test_resume_counts_the_whole_run_and_evaluates_once_more(inline):
    changes = {"prompts__options__evaluation_share": 0.3, "checkpoint__every": 1}
    broken = Flow(**inline(**changes))
    stop_after(broken, 2)
    newest = max((broken.folder / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    before = json.loads((newest / "record.json").read_text())["totals"]
    resumed = Flow.resume(broken.folder)
    list(resumed.run())
    summary = resumed.summary
    assert 0 < before["wall_s"] < before["total_s"]
    assert before["wall_s"] < summary.wall_s
    assert summary.wall_s - before["wall_s"] < summary.total_s - before["total_s"]
    assert summary.steps == 4
    assert summary.rows_trained == summary.rows_put == 64
    assert summary.eval_before is not None
    assert summary.eval_after is not None
    held_out = [s for s in lines(resumed.folder, "samples.jsonl") if s["batch"] is None]
    assert len(held_out) == summary.rows_evaluated
    assert summary.tokens_wasted_by_reason.get("resume", 0) >= 0


def test_resume_refuses_what_it_cannot_do_in_words(inline, tmp_path):
    with pytest.raises(ConfigError, match="there is no run in"):
        Flow.resume(tmp_path / "nothing")
    without = Flow(**inline(name="without"))
    stop_after(without, 2)
    with pytest.raises(ConfigError, match="has no checkpoint; start it anew, with checkpoint"):
        Flow.resume(without.folder)

    flow = Flow(**inline(name="whole", checkpoint__every=2))
    list(flow.run())
    with pytest.raises(ConfigError, match="is complete, 4 of 4 steps; to train more, give"):
        list(Flow.resume(flow.folder).run())
    with pytest.raises(ConfigError, match=r"4 steps are completed, 3 are asked for"):
        list(Flow.resume(flow.folder, {"workflow.steps": 3}).run())
    more = {"workflow.steps": 6}
    for path, value, said in (
        ("seed", 5, "seed: a resumed run keeps it, the checkpoint has 0, now it is 5"),
        ("workflow.group_size", 2, "workflow.group_size: a resumed run keeps it"),
        ("data_store.plugin", "zmq", "data_store.plugin: a resumed run keeps it"),
        ("loss.plugin", "ppo_clip", "loss.plugin"),
        ("stages.reward.function", "functions:low_letter", "stages.reward.function: a resumed"),
    ):
        with pytest.raises(ConfigError, match=said):
            list(Flow.resume(flow.folder, {**more, path: value}).run())
    damaged = flow.folder / "checkpoints" / "4" / "trainer" / "logits.npy"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-8] + b"\1" * 8)
    with pytest.raises(ConfigError, match=r"4/trainer/logits.npy' of the checkpoint is damaged"):
        list(Flow.resume(flow.folder, more).run())
    damaged.unlink()
    with pytest.raises(ConfigError, match=r"is damaged \(No such file.*to resume from step 2"):
        list(Flow.resume(flow.folder, more).run())
    damaged.write_bytes(content)

    extended = Flow.resume(flow.folder, more)
    assert [r.version for r in extended.run()] == [5, 6]
    assert_each_group_once(flow.folder, 6)


DAMAGES = {
    "life.json": (
        (b"", r"life.json' is damaged .*write .\"life\": N. into it"),
        (b'{"life": "a"}', "'a' is no number from 0 up"),
        (None, "life.json' is damaged .*No such file"),
    ),
    "metrics.jsonl": (
        (b'{"a": 1\n', r"line 1 of .*metrics.jsonl' is damaged .*; delete the line"),
        (b'{"a": 1}\n', r"line 1 of .* is damaged \(KeyError: 'version'\)"),
        (b"7\n", r"line 1 of .* is damaged \(TypeError: 7 is not a mapping\)"),
    ),
    "samples.jsonl": ((b"\xca\xfe\n", r"line 1 of .*samples.jsonl' is damaged \(UnicodeDecode"),),
    "admitted.jsonl": (
        (b"", r"has 0 whole lines, the checkpoint was made after \d+; bring it back, or resume"),
        (b'{"batch": 9}\n' * 9 + b"x\n", r"line 10 of .*admitted.jsonl' .*checkpoint.resume=exact"),
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_resume_of_a_run_with_a_damaged_file_names_it_and_changes_nothing(inline, name):
    flow = Flow(**inline(checkpoint__every=2))
    list(flow.run())
    file, more = flow.folder / name, {"workflow.steps": 6}
    content = file.read_bytes()
    for damaged, said in DAMAGES[name]:
        file.unlink() if damaged is None else file.write_bytes(damaged)
        before = files(flow.folder)
        with pytest.raises(ConfigError, match=said):
            list(Flow.resume(flow.folder, more).run())
        assert files(flow.folder) == before
    if name == "admitted.jsonl":  # the way out that was named
        more["checkpoint.resume"] = "exact"
    else:
        file.write_bytes(content)
    assert [step.version for step in Flow.resume(flow.folder, more).run()] == [5, 6]


def files(folder):
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(".tmp")
    }


def test_resume_of_a_run_that_is_going_on_is_refused(inline):
    flow = Flow(**inline(checkpoint__every=1, workflow__steps=1000))
    steps = flow.run()
    next(steps)
    next(steps)
    with pytest.raises(ConfigError, match=r"a run is going on in .*; wait for its end"):
        list(Flow.resume(flow.folder).run())
    steps.close()


def test_resume_with_other_prompts_is_refused(inline):
    tree = inline(checkpoint__every=1)
    flow = Flow(**tree)
    stop_after(flow, 2)
    prompts = Path(tree["prompts"]["options"]["path"])
    prompts.write_text("".join(f'{{"prompt": "{c}"}}\n' for c in "zyxwvutsrqpo"))
    with pytest.raises(ConfigError, match="they are not those that the run began with"):
        list(Flow.resume(flow.folder).run())


@pytest.mark.parametrize(("preset", "resume"), [("sequential", "exact"), ("async", "reuse")])
def test_resume_with_a_durable_store(inline, preset, resume):
    pytest.importorskip("asyncflow_store_zmq")
    changes = {
        "workflow__preset": preset,
        "workflow__steps": 8,
        "data_store": {"plugin": "zmq", "options": {"durability": "journal", "shards": 1}},
        "checkpoint": {"every": 3, "resume": resume},
        "evaluation": {"samples": 2},
        "prompts__options__evaluation_share": 0.3,
    }
    flow = Flow(**inline(name="broken", **changes))
    stop_after(flow, 5)
    assert (flow.folder / "store").is_dir()
    for stop in (5, 7, 8):
        flow = Flow.resume(flow.folder)
        stop_after(flow, stop)
    assert_each_group_once(flow.folder, 8)
    if preset == "sequential":
        straight = Flow(**inline(name="straight", **changes))
        list(straight.run())
        assert_equal_weights(weights(straight.folder, 8), weights(flow.folder, 8))


def test_resume_from_an_older_checkpoint_than_the_store_knows(inline, caplog):
    """The newest one was damaged and deleted: the store has let go of what it covered."""
    pytest.importorskip("asyncflow_store_zmq")
    durable = {"durability": "journal", "shards": 1}
    flow = Flow(
        **inline(
            data_store={"plugin": "zmq", "options": durable},
            workflow__steps=8,
            checkpoint__every=2,
        )
    )
    stop_after(flow, 5)
    versions = sorted(int(path.name) for path in (flow.folder / "checkpoints").glob("[0-9]*"))
    shutil.rmtree(flow.folder / "checkpoints" / str(versions[-1]))
    resumed = Flow.resume(flow.folder)
    assert resumed.resumed_from == versions[-2]
    list(resumed.run())
    assert "all rows that are not trained are generated again" in caplog.text
    assert_each_group_once(flow.folder, 8)
    assert resumed.summary.tokens_wasted_by_reason["resume"] > 0


def generated(folder, version):
    """Recorded rows that are not trained at a version: those of it or older ones, and later."""
    newest = {
        sample["key"]: max(found for found, _ in sample["versions"])
        for sample in lines(folder, "samples.jsonl")
        if sample["batch"] >= version
    }
    kept = {key for key, found in newest.items() if found <= version}
    return kept, newest.keys() - kept


async def test_durable_store_keeps_rows_of_the_checkpoints_versions_and_no_others(inline):
    store = pytest.importorskip("asyncflow_store_zmq.store")
    options = importlib.import_module("asyncflow_store_zmq.options")
    durable = {"durability": "journal", "shards": 1}
    changes = {
        "workflow__steps": 40,
        "workflow__max_staleness": 3,
        "workflow__pacing": False,
        "data_store": {"plugin": "zmq", "options": durable},
        "checkpoint__every": 8,
        "evaluation": None,
    }
    flow = Flow(**inline(**changes))
    kept = void = set()
    async with contextlib.aclosing(flow.stream()) as steps:
        async for step in steps:
            if 8 <= step.version < 15:
                kept, void = generated(flow.folder, 8)
                if kept and void:
                    break
    assert kept
    assert void
    where = options.ZmqOptions(directory=flow.folder / "store", max_staleness=3, **durable)
    async with store.ZmqDataStore(where) as opened:
        await opened.restore(8)
        lease = await opened.lease("rollout", requester="test", version=1000)
        again = {str(info.key) for info in lease.rows}
    assert void <= again
    assert not kept & again


async def test_command_resumes_a_killed_run_and_says_from_where(started, tmp_path):
    run = started(workflow__steps=2000, checkpoint__every=2, evaluation=None, name="killed")
    await run.at_step(3)
    run.process.kill()
    await run.ended("kill -9 of a run with checkpoints", status=-9)
    done = resume(run.folder, "workflow.steps=2000", "seed=3")
    assert done.returncode == 2
    assert "seed: a resumed run keeps it, the checkpoint has 0, now it is 3" in done.stderr
    steps = int(max((run.folder / "checkpoints").glob("[0-9]*"), key=lambda p: int(p.name)).name)
    done = resume(run.folder, f"workflow.steps={steps + 2}")
    assert done.returncode == 0, done.stderr
    assert f"run killed, resumed from step {steps}: async" in done.stdout
    assert_each_group_once(run.folder, steps + 2)
    done = resume(run.folder)
    assert done.returncode == 2
    assert "is complete" in done.stderr


def resume(folder, *overrides):
    """`asyncflow run --resume`."""
    command = [sys.executable, "-m", "asyncflow_core.cli", "run", "--resume", str(folder)]
    return subprocess.run(
        [*command, *overrides], cwd=Path(__file__).parent, capture_output=True, text=True
    )
