"""What `asyncflow init` writes, and that it is sound, runs and learns."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("asyncflow")
FILES = {"config.yaml", "prompts.jsonl", "reward.py"}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """An empty folder, where the command is started; what it imports is forgotten."""
    made = tmp_path / "user"
    made.mkdir()
    monkeypatch.chdir(made)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "reward", raising=False)
    yield
    sys.modules.pop("reward", None)


def written(folder):
    return {path.name for path in Path(folder).iterdir()}


def model_directory(folder):
    """What the doctor looks for in a model's directory."""
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")


@pytest.mark.multiproc
def test_init_job_runs_with_core_alone_learns_and_is_reported():
    here = Path.cwd()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("ASYNCFLOW")}
    said = {}
    for arguments in (
        ["init"],
        ["doctor", "config.yaml"],
        ["run", "config.yaml"],
        ["report", "first_run", "--json"],
    ):
        done = subprocess.run(
            [COMMAND, *arguments],
            env={**inherited, "ASYNCFLOW_PLUGINS": "asyncflow-core"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said[arguments[0]] = done.stdout
    assert written(here) >= FILES
    for command in ("asyncflow doctor config.yaml", "asyncflow run config.yaml"):
        assert f"\n  {command}\n" in said["init"]
    assert "no faults" in said["doctor"]
    found = json.loads(said["report"])
    assert found["state"] == "finished"
    assert found["learning"]["reward"]["word"] == "rose"
    before, *_, after = found["learning"]["scores"]
    assert (before["version"], after["version"]) == (0, 60)
    assert after["score"] > 0.8 > 0.2 > before["score"]
    assert found["notes"] == []


def test_init_elsewhere_says_to_go_there(command):
    status, out, _ = command("init", "my jobs/first")
    assert status == 0
    assert written("my jobs/first") == FILES
    assert "\n  cd 'my jobs/first'\n  asyncflow doctor config.yaml\n" in out


@pytest.mark.parametrize("name", sorted(FILES))
def test_init_file_in_the_way_is_named_and_nothing_is_written(name, command):
    Path(name).symlink_to("nowhere")  # not even a link that leads nowhere is followed
    status, out, err = command("init")
    assert (status, out) == (2, "")
    assert f"init: {name} is in the way" in err
    assert written(".") == {name}


def test_init_all_files_in_the_way_are_named_at_once(command):
    assert command("init")[0] == 0
    before = {path: path.read_bytes() for path in Path.cwd().iterdir()}
    status, _, err = command("init", "--model", "m")
    assert status == 2
    assert "config.yaml, reward.py, prompts.jsonl are in the way" in err
    assert {path: path.read_bytes() for path in Path.cwd().iterdir()} == before


def test_init_folder_that_cannot_be_made_says_so(command):
    Path("file").write_text("mine")
    status, _, err = command("init", "file/job")
    assert status == 2
    assert "cannot be written: Not a directory" in err
    assert Path("file").read_text() == "mine"


def test_init_that_cannot_write_all_files_leaves_none(command, monkeypatch):
    monkeypatch.setattr("asyncflow_core.cli.init.job", lambda model: {"a": "1", "no/b": "2"})
    status, _, err = command("init")
    assert status == 2
    assert "'no/b' cannot be written" in err
    assert written(".") == set()


def test_init_with_a_model_is_accepted_by_the_doctor(command):
    model_directory(Path("models") / 'a "strange": name')
    assert command("init", "job", "--model", 'models/a "strange": name')[0] == 0
    os.chdir("job")
    status, out, _ = command("doctor", "config.yaml", "--json")
    found = json.loads(out)
    assert found["faults"] == []
    assert status == 0
    chosen = {section: plugin["plugin"] for section, plugin in found["plugins"].items()}
    assert (chosen["trainer"], chosen["rollout"]) == ("hzp", "transformers")
    assert (chosen["data_store"], chosen["weight_sync"]) == ("zmq", "host")


def test_init_with_a_model_that_is_not_there_has_no_other_fault(command):
    status, out, _ = command("init", "--model", "later")
    assert status == 0
    assert "there is no model in later yet" in out
    status, out, _ = command("doctor", "config.yaml", "--json")
    assert status == 2
    (fault,) = json.loads(out)["faults"]
    assert "model: there is no directory" in fault


def test_init_rewards_are_right():
    from asyncflow_core.cli._jobs import hzp_reward, tabular_reward
    from asyncflow_core.cli.init import job

    for model, module in ((None, tabular_reward), ("m", hzp_reward)):
        lines = job(model)["prompts.jsonl"].splitlines()
        assert len(set(lines)) == len(lines) > 200
        for line in map(json.loads, lines):
            assert module.right(line["answer"], line["answer"]) == 1.0
            assert module.right(f"{line['answer']}9", line["answer"]) == 0.0
    assert hzp_reward.right("12 + 30 is 42.", "42") == 1.0
    assert hzp_reward.right("I do not know", "42") == 0.0
