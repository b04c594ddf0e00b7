"""What is read back from memory and files, garbled: an error that says where, never a silence."""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.errors import DataError
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.data_store import prompts
from asyncflow_store_zmq.durable import first_lease
from asyncflow_store_zmq.journal import Journal
from asyncflow_store_zmq.layout import Layout, Piece, pack, take
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.spec import StoreSpec
from asyncflow_store_zmq.store import ZmqDataStore

BATCH = Batch(
    {
        "prompt_ids": Column.ragged([np.arange(n, dtype=np.int32) for n in (3, 0, 500)]),
        "reward": Column.dense(np.zeros(3, np.float32)),
        "versions": Column.ragged([np.ones((n, 2), np.int32) for n in (1, 2, 1)]),
        "finish_reason": Column.objects(["stop", {"a": [1.5, None]}, b"x"]),
    }
)
RECORDS = [["task", f"t{number}", ["a"] * number] for number in range(20)]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_layout_of_any_bytes_is_a_layout_or_a_data_error(data):
    with contextlib.suppress(DataError):
        layout = Layout.load(data)
        assert Layout.load(layout.dump()) == layout


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_garbled_segment_is_read_or_refused_in_words(data):
    packed = pack(BATCH)
    memory = np.zeros(packed.nbytes, np.uint8)
    packed.write(memory)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 8 * len(BATCH) * 2 + 100))
        memory[min(place, len(memory) - 1)] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(memory), len(memory) // 2, 40, 0]))
    first = data.draw(st.integers(0, 3))
    piece = Piece(memory[:cut], packed.layout, 3, first, data.draw(st.integers(first, 3)))
    for name in BATCH:
        try:
            take([piece], [name])
        except DataError as error:
            text = str(error)
            assert re.search(rf"column '{name}'|an object of a segment", text), text


def written(directory):
    """A journal with `RECORDS`, and its bytes."""
    directory.mkdir(mode=0o700, exist_ok=True)
    for path in directory.glob("journal-*"):
        path.unlink()
    journal = Journal(directory)
    journal.append(RECORDS)
    journal.close()
    path = directory / "journal-1"
    return path, path.read_bytes()


def reread(directory):
    journal = Journal(directory)
    try:
        return list(journal.read())
    finally:
        journal.close()


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400))
def test_journal_cut_short_gives_a_prefix_and_goes_on(cut):
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        path, whole = written(directory)
        path.write_bytes(whole[: len(whole) - min(cut, len(whole))])
        found = reread(directory)
        assert found == RECORDS[: len(found)]
        journal = Journal(directory)
        list(journal.read())
        journal.append([["leave", "t"]])
        journal.close()
        assert reread(directory) == [*found, ["leave", "t"]]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_journal_with_any_byte_changed_is_refused_by_file_and_offset(data):
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        path, whole = written(directory)
        place = data.draw(st.integers(0, len(whole) - 1))
        changed = bytearray(whole)
        changed[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(changed)
        with pytest.raises(DataError) as caught:
            reread(directory)
        assert str(path) in str(caught.value)
        assert path.read_bytes() == changed  # nothing was cut off
        if place >= 8:
            offset = int(re.search(r"at byte (\d+)", str(caught.value))[1])
            assert offset <= place
            assert f"truncate -s {offset} {path}" in str(caught.value)
            path.write_bytes(changed[:offset])
            found = reread(directory)
            assert found == RECORDS[: len(found)]


def test_unfinished_record_is_said_with_file_and_offset(tmp_path, caplog):
    path, whole = written(tmp_path / "j")
    path.write_bytes(whole + whole[8:20])
    assert reread(tmp_path / "j") == RECORDS
    assert f"{path} at byte {len(whole)}: 12 bytes of an unfinished record" in caplog.text
    assert path.read_bytes() == whole


def test_zeros_of_a_dead_machine_at_the_end_are_unfinished(tmp_path):
    path, whole = written(tmp_path / "j")
    path.write_bytes(whole + bytes(5000))
    assert reread(tmp_path / "j") == RECORDS


def test_journal_of_another_version_is_refused(tmp_path):
    path, whole = written(tmp_path / "j")
    path.write_bytes(b"AFSTORE1" + whole[8:])
    with pytest.raises(DataError, match="another version"):
        reread(tmp_path / "j")


@pytest.mark.parametrize("text", ["", "x", "-3", "1.5"])
def test_garbled_count_of_lives_is_refused(tmp_path, text):
    spec = StoreSpec(str(tmp_path), "", "", "t", 1, "journal", 1, 1, 0, 5.0)
    (tmp_path / "life").write_text(text)
    with pytest.raises(DataError, match=r"life, which counts the lives of the store, holds"):
        first_lease(spec)
    (tmp_path / "life").unlink()
    (tmp_path / "journal-1").touch()
    with pytest.raises(DataError, match="is missing beside a journal"):
        first_lease(spec)


@pytest.mark.multiproc
async def test_store_refuses_to_start_on_a_damaged_journal_and_starts_with_a_whole_one(tmp_path):
    directory = tmp_path / "kept"
    options = ZmqOptions(shards=1, durability="journal", directory=directory)
    async with ZmqDataStore(options) as store:
        await store.register(TaskSpec("log", ("prompt_ids",)))
        for number in range(3):
            await store.put(prompts(1), keys=[GroupKey(0, 0, number)])
    (path,) = directory.glob("journal-*")
    whole = path.read_bytes()
    path.write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
    with pytest.raises(DataError, match=rf"{path} at byte \d+: .*truncate -s \d+ {path}"):
        await ZmqDataStore(options).open()
    assert path.stat().st_size == len(whole)
    path.write_bytes(whole)
    async with ZmqDataStore(options) as store:
        assert (await store.stats()).rows == 3
