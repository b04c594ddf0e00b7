"""What a run leaves behind."""

import asyncio
import errno
import json
import os
import subprocess
import sys
import threading
import unittest.mock
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column, GroupKey, Key
from asyncflow_core.config import RunConfig
from asyncflow_core.errors import ConfigError, DataError, ServiceError
from asyncflow_core.flow.running.folder import RunFolder
from asyncflow_core.flow.running.record import Recorder
from asyncflow_core.parts import PartContext
from asyncflow_core.reference.tokenizer import CharactersOptions, CharactersTokenizer
from asyncflow_core.services.data_store import RowInfo

CONFIG = {
    "prompts": {"plugin": "p"},
    "rollout": {"plugin": "r"},
    "trainer": {"plugin": "t"},
    "loss": {"plugin": "l"},
    "stages": {},
    "workflow": {"steps": 1, "groups_per_step": 1, "group_size": 1},
}


@pytest.fixture
def config(tmp_path):
    return RunConfig(**CONFIG, name="mine", out=str(tmp_path / "runs"))


@pytest.fixture
def folder(config):
    made = RunFolder(config)
    yield made
    made.close()


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as made:
        yield made


def test_folder_fresh_holds_config_and_environment(folder, tmp_path):
    assert folder.path == tmp_path / "runs" / "mine"
    assert folder.moved_to is None
    assert sorted(p.name for p in folder.path.iterdir()) == [
        *("config.yaml", "environment.json", "life.json", "logs")
    ]
    environment = json.loads((folder.path / "environment.json").read_text())
    assert "numpy" in environment["packages"]
    assert folder.log_path("rollout-0") == str(folder.path / "logs" / "rollout-0.log")


def test_folder_number_that_is_not_finite_is_null_in_its_line(folder):
    folder.append("metrics.jsonl", [{"loss": float("nan"), "x": 1.5, "y": float("-inf")}])
    assert (folder.path / "metrics.jsonl").read_text() == '{"loss": null, "x": 1.5, "y": null}\n'


def test_folder_existing_is_moved_aside_whole_each_time(config, tmp_path):
    for number in range(3):
        folder = RunFolder(config)
        folder.append("metrics.jsonl", [{"run": number}])
        folder.close()
    runs = tmp_path / "runs"
    assert sorted(p.name for p in runs.iterdir()) == ["mine", "mine-1", "mine-2"]
    found = {p.name: json.loads((p / "metrics.jsonl").read_text())["run"] for p in runs.iterdir()}
    assert found == {"mine-1": 0, "mine-2": 1, "mine": 2}
    assert folder.moved_to == runs / "mine-2"


def test_folder_existing_file_in_its_place_is_moved_aside(config, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").write_text("not a folder")
    assert RunFolder(config).moved_to == tmp_path / "runs" / "mine-1"
    assert (tmp_path / "runs" / "mine-1").read_text() == "not a folder"


def test_folder_of_a_run_that_goes_on_is_refused_until_it_ends(folder, config, tmp_path):
    folder.append("metrics.jsonl", [{"run": 0}])
    with pytest.raises(ConfigError, match=r"name: a run is going on in .*/runs/mine'"):
        RunFolder(config)
    assert (folder.path / "metrics.jsonl").exists()
    folder.close()
    next_one = RunFolder(config)
    assert next_one.moved_to == tmp_path / "runs" / "mine-1"
    next_one.close()


def test_folder_of_a_run_that_was_killed_is_moved_aside(config):
    code = (
        "import os, sys; from asyncflow_core.flow.running.folder import RunFolder;"
        "from asyncflow_core.config import RunConfig;"
        "made = RunFolder(RunConfig.model_validate_json(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, config.model_dump_json()], check=False)
    folder = RunFolder(config)
    assert folder.moved_to is not None
    folder.close()


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_folder_that_cannot_be_written_is_said_with_the_file_and_still_closes(folder, monkeypatch):
    folder.append("samples.jsonl", [{"a": 1}])
    file = folder._files["samples.jsonl"]
    full = unittest.mock.Mock(wraps=file, **{"flush.side_effect": FULL, "close.side_effect": FULL})
    monkeypatch.setitem(folder._files, "samples.jsonl", full)
    with pytest.raises(ServiceError, match=r"mine/samples.jsonl' cannot be written: No space left"):
        folder.append("samples.jsonl", [{"a": 2}])
    monkeypatch.setattr(Path, "write_text", unittest.mock.Mock(side_effect=FULL))
    with pytest.raises(ServiceError, match=r"mine/summary.json' cannot be written: No space left"):
        folder.write_json("summary.json", {})
    folder.close()
    file.close()


def test_folder_on_a_full_disk_is_refused_before_the_start(config, monkeypatch):
    monkeypatch.setattr(Path, "write_text", unittest.mock.Mock(side_effect=FULL))
    with pytest.raises(ConfigError, match="cannot be made: No space left on device"):
        RunFolder(config)


def test_folder_appended_lines_are_there_at_once(folder):
    folder.append("a.jsonl", [{"x": 1}, {"y": "\u00e4\n"}])
    folder.append("a.jsonl", [{"z": None}])
    lines = (folder.path / "a.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"x": 1}, {"y": "\u00e4\n"}, {"z": None}]
    folder.write_json("b.json", {"c": [1]})
    assert json.loads((folder.path / "b.json").read_text()) == {"c": [1]}
    assert not list(folder.path.glob(".*"))


def rows(batch, rewards, *, first=0, epoch=0, errors=None):
    count = len(rewards)
    infos = [RowInfo(n, Key(0, epoch, first + n, 0), batch) for n in range(count)]
    columns = {
        "prompt_ids": Column.ragged([[0, 1]] * count, np.int32),
        "response_ids": Column.ragged([[2]] * count, np.int32),
        "reward": Column.dense(rewards, np.float32),
        "versions": Column.ragged([np.array([[3, 1]], np.int32)] * count, np.int32),
        "finish_reason": Column.objects(["stop"] * count),
    }
    if errors is not None:
        columns["reward_error"] = Column.objects(errors)
    return infos, Batch(columns)


def groups(first, end):
    """Of `rows`: a group a row."""
    return [GroupKey(0, 0, number) for number in range(first, end)]


async def test_recorder_counts_groups_and_evaluations_apart(folder, thread):
    recorder = Recorder(folder, None, thread)
    await recorder.observe(*rows(0, [1.0, 0.0]))
    await recorder.observe(*rows(1, [0.5], first=2))
    await recorder.observe(*rows(None, [1.0], epoch=1))
    await recorder.observe(*rows(1, [0.5], first=9))
    first = await recorder.wait_groups(groups(0, 2), 2)
    assert (first.values, first.tokens, first.errors) == ([1.0, 0.0], 2, 0)
    assert recorder.forget(GroupKey(0, 0, 9)) == 1  # a token of a group that was dropped
    assert list(recorder.groups) == groups(2, 3)  # so that a long run does not grow
    found = recorder.take_evaluation(1)
    assert (found.values, found.oldest, found.newest) == ([1.0], 3, 3)
    assert 1 not in recorder.evaluations
    assert (await recorder.wait_groups(groups(2, 3), 1)).values == [0.5]


async def test_recorder_wait_ends_with_the_last_row(folder, thread):
    recorder = Recorder(folder, None, thread)
    waiting = asyncio.create_task(recorder.wait_groups(groups(0, 3), 3))
    await recorder.observe(*rows(4, [1.0, 1.0]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    await recorder.observe(*rows(4, [0.0], first=2))
    assert len((await asyncio.wait_for(waiting, 5)).values) == 3


async def test_recorder_writes_samples_as_text_with_reward_errors(folder, thread):
    tokenizer = CharactersTokenizer(CharactersOptions(alphabet="abc"), PartContext())
    ids = [tokenizer.encode(c)[0] for c in "abc"]
    recorder = Recorder(folder, tokenizer, thread)
    infos, batch = rows(0, [0.0, 1.0], errors=["ValueError: no", None])
    batch = batch.with_columns(
        {
            "prompt_ids": Column.ragged([ids[:2]] * 2, np.int32),
            "response_ids": Column.ragged([ids[2:]] * 2, np.int32),
        }
    )
    await recorder.observe(infos, batch)
    lines = [json.loads(line) for line in (folder.path / "samples.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "key": "0/0/0/0",
        "batch": 0,
        "prompt": "ab",
        "response": "c",
        "reward": 0.0,
        "versions": [[3, 1]],
        "finish_reason": "stop",
        "reward_error": "ValueError: no",
    }
    assert "reward_error" not in lines[1]
    found = await recorder.wait_groups(groups(0, 2), 2)
    assert found.errors == 1


async def test_recorder_row_seen_twice_counts_once(folder, thread):
    """It does come twice, when the recorder's lease was lost between the file and the commit."""
    recorder = Recorder(folder, None, thread)
    await recorder.observe(*rows(0, [1.0, 0.0]))
    await recorder.observe(*rows(0, [1.0, 0.0, 0.5]))
    assert (await recorder.wait_groups(groups(0, 3), 3)).values == [1.0, 0.0, 0.5]
    assert len((folder.path / "samples.jsonl").read_text().splitlines()) == 3
    await recorder.observe(*rows(0, [0.0, 0.5]))  # when its step was recorded
    assert len((folder.path / "samples.jsonl").read_text().splitlines()) == 3
    assert recorder.groups == {}


async def test_recorder_row_that_the_tokenizer_cannot_decode_is_named(folder, thread):
    tokenizer = CharactersTokenizer(CharactersOptions(alphabet="abc"), PartContext())
    infos, batch = rows(0, [1.0])
    batch = batch.with_columns({"response_ids": Column.ragged([[99]], np.int32)})
    recorder = Recorder(folder, tokenizer, thread)
    with pytest.raises(DataError, match=r"row 0/0/0/0: the tokenizer cannot decode \[99\]: "):
        await recorder.observe(infos, batch)


async def test_recorder_slow_texts_leave_the_event_loop_free(folder, thread):
    gate = threading.Event()

    class Slow:
        def decode(self, ids):
            gate.wait()
            return "x"

    recorder = Recorder(folder, Slow(), thread)
    observing = asyncio.create_task(recorder.observe(*rows(0, [1.0])))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not observing.done()
    gate.set()
    await observing
