"""What `asyncflow top` prints of a status."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from asyncflow_core.cli.main import main
from asyncflow_core.cli.progress import Progress
from asyncflow_core.cli.top import picture
from asyncflow_core.config import RunConfig
from asyncflow_core.flow.running.results import Summary
from asyncflow_core.flow.running.status import Bottleneck, Staleness, Status, Tokens, WorkerStatus
from asyncflow_core.services.data_store import StoreStats, TaskStats

STATUS = Status(
    run="r",
    preset="async",
    state="running",
    pid=7,
    host="here",
    time=1000.0,
    elapsed_s=75.0,
    every_s=1.0,
    version=3,
    steps=9,
    step_wall_s=1.5,
    tokens_per_s=12345.0,
    reward=0.25,
    scores=[(0, 0.1), (2, 0.3)],
    workers=[
        WorkerStatus("trainer-0", "train", 0.97, 0.02, 400),
        WorkerStatus("rollout-0", "rollout", 0.5, 0.1, 300, version=3, running=12),
        WorkerStatus("rollout-1", "rollout", 0.0, 0.0, 300, version=2, silent_s=9.0),
    ],
    store=StoreStats(
        rows=5,
        bytes=3 << 20,
        capacity_bytes=4 << 20,
        reserved_bytes=1 << 20,
        waiting_puts=1,
        rows_dropped={"refused by the engine": 2},
        tasks={"rollout": TaskStats(1, 4, 9, 3, {"rollout-0": 4})},
    ),
    staleness=Staleness(1, {0: 8, 1: 24}, [(1, {0: 8}), (2, {1: 12}), (3, {1: 12})]),
    tokens=Tokens(generated=1000, trained=800, evaluated=50, kept=7, wasted={"switch": 150}),
    waits=[f"step {number} waits" for number in range(12)],
    bottleneck=Bottleneck("trainer", "trainer busy 97%: " + "long words " * 20, ("a.b: more",)),
)


def shown(status=STATUS, *, now=1000.5, summary=None):
    return list(picture(status, summary, now=now))


def test_picture_fits_80_columns_whatever_it_holds():
    long = dataclasses.replace(
        STATUS,
        run="r" * 200,
        host="h" * 90,
        error="why " * 90,
        workers=[WorkerStatus("w" * 60, "t", 1.0, 1.0, 10**9, 10**6, 10**6, 10**6, 10**6)],
        bottleneck=Bottleneck("x", "y" * 300, ("z" * 200,)),
    )
    for status in (STATUS, long):
        assert max(map(len, shown(status))) <= 79


def test_picture_says_it_all():
    text = "\n".join(shown())
    for part in (
        "run r: running, async, step 3/9, 1:15, process 7 on here",
        "reward 0.250, 1.50 s, 12.3k tokens/s",
        "held-out score by version: v0 0.100, v2 0.300",
        "trainer-0            97%    2%",
        "v3 12 run",
        "SILENT 9s",
        "rollout                  1       4         9  rollout-0 4 (3 leases ran out)",
        "5 rows, 3.0 MiB, 25% of its credit taken, 1 producers wait",
        "rows dropped: refused by the engine 2",
        "   0         8  25%",
        "   1        24  75%",
        "v1 0.00/0, v2 1.00/1, v3 1.00/1",
        "tokens: 1000 generated, 800 trained, 50 evaluated, 7 kept",
        "wasted (15.0%): switch 150",
        "  step 7 waits",
        "  and 4 more",
        "bottleneck: trainer busy 97%",
        "  try a.b: more",
    ):
        assert part in text, part
    assert "last heard" not in text


def test_picture_of_a_run_that_went_silent_says_since_when():
    assert any("last heard 0:42 ago" in line for line in shown(now=1042.0))
    ended = dataclasses.replace(STATUS, state="finished")
    assert not any("last heard" in line for line in shown(ended, now=1042.0))


def test_top_of_a_run_that_was_killed_has_status_1_and_how_to_go_on(tmp_path, capsys, monkeypatch):
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    folder = tmp_path / "runs" / "mine"
    (folder / "checkpoints" / "2").mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    monkeypatch.chdir(tmp_path)

    def killed(**changes):
        silent = {"pid": done.pid, "host": socket.gethostname(), "time": time.time() - 42}
        status = dataclasses.replace(STATUS, **{**silent, **changes})
        (folder / "status.json").write_bytes(status.to_json())
        return main(["top", "mine", "--once"]), capsys.readouterr().out

    status, text = killed()
    assert status == 1
    assert "0:42 ago: the run's process is gone, it was killed" in text
    assert text.endswith("`asyncflow run --resume runs/mine` goes on from step 2\n")
    assert main(["top", "mine", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["gone"] is True
    # What only that machine can tell, and what has only just begun to be silent.
    for other in ({"host": "elsewhere"}, {"pid": os.getpid()}, {"time": time.time()}):
        status, text = killed(**other)
        assert (status, "gone, it" in text) == (0, False)


def test_top_once_and_json_of_a_finished_run(tmp_path, capsys):
    folder = tmp_path / "done"
    folder.mkdir()
    ended = dataclasses.replace(STATUS, state="finished")
    (folder / "status.json").write_bytes(ended.to_json())
    names = [field.name for field in dataclasses.fields(Summary)]
    (folder / "summary.json").write_text(json.dumps(dict.fromkeys(names, 1)))
    assert main(["top", str(folder), "--once"]) == 0
    text = capsys.readouterr().out
    assert "run r: finished" in text
    assert "summary: 1 rows trained in 1 s, staleness mean 1.00, max 1 of 1" in text
    assert "\x1b" not in text
    assert main(["top", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "finished"
    assert found["summary"]["rows_trained"] == 1
    assert found["bottleneck"]["what"] == "trainer"


def test_top_of_a_failed_run_has_status_1_and_says_why(tmp_path, capsys, monkeypatch):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    failed = dataclasses.replace(STATUS, state="failed", error="PeerLostError: it died\nlast lines")
    (tmp_path / "runs" / "mine" / "status.json").write_bytes(failed.to_json())
    monkeypatch.chdir(tmp_path)
    assert main(["top", "mine"]) == 1
    text = capsys.readouterr().out
    assert "!! ended by PeerLostError: it died\n" in text
    assert "last lines" not in text


def test_top_on_a_terminal_refreshes_until_the_run_ends(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    path = tmp_path / "status.json"
    path.write_bytes(STATUS.to_json())

    def sleep(seconds):
        assert seconds == STATUS.every_s
        path.write_bytes(dataclasses.replace(STATUS, state="interrupted").to_json())

    monkeypatch.setattr("time.sleep", sleep)
    assert main(["top", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.count("\x1b[H") == 2
    assert text.index("running") < text.index("interrupted")


@pytest.mark.parametrize("run", ["nothing", "a/b"])
def test_top_of_no_run_says_where_it_looked(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["top", run]) == 2
    assert f"neither {run}/status.json nor runs/{run}/status.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("status.json", "status.json' cannot be shown: this is not the status of a run"),
        ("summary.json", "summary.json' cannot be shown: it is no JSON"),
    ],
)
def test_damaged_file_is_named_with_what_to_do(tmp_path, command, name, said):
    (tmp_path / "status.json").write_bytes(dataclasses.replace(STATUS, state="finished").to_json())
    (tmp_path / name).write_text("{")
    status, _, err = command("top", str(tmp_path))
    assert status == 1
    assert said in err
    assert "Traceback" not in err


class Full:
    """A stream that takes nothing."""

    def write(self, text):
        raise OSError(28, "No space left on device")

    def flush(self):
        pass

    def isatty(self):
        return False


def test_progress_that_cannot_be_shown_ends_no_run(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stdout", Full())
    part = {"plugin": "any"}
    config = RunConfig(
        **dict.fromkeys(("prompts", "rollout", "trainer", "loss"), part),
        stages={},
        workflow={"steps": 1, "groups_per_step": 1, "group_size": 1},
    )
    progress = Progress(config)
    progress.starting(None)
    progress.starting(None)
    assert len(caplog.messages) == 1
    assert "cannot be shown any more" in caplog.messages[0]
