"""Checkpoints: whole or not there, and damage is noticed by the file."""

import json

import pytest

from asyncflow_core.errors import ConfigError, ServiceError
from asyncflow_core.flow.running.checkpoint import Checkpoint, Checkpoints


def checkpoint(version):
    return Checkpoint(version, 0, {"batches": []}, 3, {"rows": 1.5}, {"seed": 1})


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path)


def save(checkpoints, version, content="w"):
    path = checkpoints.begin(version)
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "weights").write_text(content)
    checkpoints.finish(checkpoint(version))


def test_checkpoint_counts_only_once_it_is_finished(checkpoints):
    assert checkpoints.versions() == []
    (checkpoints.begin(2)).mkdir()
    assert checkpoints.versions() == []
    save(checkpoints, 2)  # what the death left is no obstacle
    save(checkpoints, 10)
    assert checkpoints.versions() == [2, 10]
    assert checkpoints.load(10) == checkpoint(10)
    assert (checkpoints.trainer(10) / "deep" / "weights").read_text() == "w"


def test_prune_keeps_the_newest_and_sweeps_what_deaths_left(checkpoints):
    for version in (1, 2, 3):
        save(checkpoints, version)
    checkpoints.begin(4)
    (checkpoints.path / ".old-0").mkdir()
    checkpoints.prune(2)
    assert sorted(p.name for p in checkpoints.path.iterdir()) == ["2", "3"]


@pytest.mark.parametrize("name", ["trainer/deep/weights", "record.json"])
@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
def test_damaged_checkpoint_names_the_file_and_the_way_out(checkpoints, name, damage):
    save(checkpoints, 1)
    save(checkpoints, 2, "some longer content")
    file = checkpoints.path / "2" / name
    content = file.read_bytes()
    if damage == "bit":
        file.write_bytes(content.replace(b"longer" if b"longer" in content else b"1.5", b"2.5"))
    elif damage == "cut":
        file.write_bytes(content[:-3])
    else:
        file.unlink()
    with pytest.raises(ConfigError) as found:
        checkpoints.load(2)
    assert f"{file}' of the checkpoint is damaged" in str(found.value)
    assert f"delete '{checkpoints.path / '2'}' to resume from step 1" in str(found.value)


def test_the_only_checkpoint_damaged_says_so(checkpoints):
    save(checkpoints, 1)
    (checkpoints.path / "1" / "record.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ConfigError, match=r"its format is not 1.*it is the only checkpoint"):
        checkpoints.load(1)


def test_checkpoint_without_a_file_of_the_trainer_does_not_count(checkpoints):
    checkpoints.begin(1).mkdir()
    with pytest.raises(
        ServiceError, match=r"wrote no file into .*part-1/trainer', so step 1 could"
    ):
        checkpoints.finish(checkpoint(1))
    assert checkpoints.versions() == []


def test_checkpoint_that_cannot_be_written_says_where(checkpoints):
    trainer = checkpoints.begin(1)
    trainer.mkdir()
    trainer.joinpath("weights").touch()
    checkpoints.path.joinpath("1").mkdir()
    checkpoints.path.joinpath("1", "full").touch()
    with pytest.raises(ServiceError, match=r"part-1' cannot be written: Directory not empty"):
        checkpoints.finish(checkpoint(1))


def test_begin_where_nothing_can_be_written_says_where_and_how_to_go_on(checkpoints, tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    said = r"part-4' cannot be written: Not a directory; make room there"
    with pytest.raises(ServiceError, match=said):
        checkpoints.begin(4)
