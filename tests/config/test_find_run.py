"""A run is named in one way, whatever is done with it."""

import pytest

from asyncflow_core.cli.main import main


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A run that left no checkpoint, seen from where it was started."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    for name in ("config.yaml", "environment.json"):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("how", ["mine", "runs/mine", "{folder}", "runs/mine/"])
def test_resume_finds_a_run_by_name_and_by_folder(begun, how, capsys):
    assert main(["run", "--resume", how.format(folder=begun)]) == 2
    assert "runs/mine' has no checkpoint" in capsys.readouterr().err


def test_resume_takes_no_folder_that_only_has_a_configuration_for_a_run(begun, tmp_path, capsys):
    other = tmp_path / "mine"
    other.mkdir()
    (other / "config.yaml").touch()
    assert main(["run", "--resume", "mine"]) == 2
    assert "'runs/mine' has no checkpoint" in capsys.readouterr().err


def test_resume_of_no_run_says_where_it_looked(begun, capsys):
    assert main(["run", "--resume", "yours"]) == 2
    said = capsys.readouterr().err
    assert "neither yours/environment.json nor runs/yours/environment.json is there" in said
