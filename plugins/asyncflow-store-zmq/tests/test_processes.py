"""The processes of a store: they end with whoever started them, and leave nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.errors import ConfigError, DataError, PeerLostError
from asyncflow_core.services.data_store import SupportsAttach, SupportsDurability, TaskSpec
from asyncflow_core.testing.aio import eventually
from asyncflow_core.testing.data_store import prompts
from asyncflow_store_zmq.journal import Journal
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

STARTER = """
import asyncio
from asyncflow_store_zmq.store import ZmqDataStore

async def main():
    store = ZmqDataStore()
    await store.open()
    print(*store.processes.pids, store.processes.spec.directory, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def there(directory):
    return Path(directory).is_dir()


@pytest.mark.multiproc
async def test_processes_end_with_a_killed_starter():
    starter = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STARTER, stdout=asyncio.subprocess.PIPE
    )
    *pids, _ = (await starter.stdout.readline()).decode().split()
    assert all(map(alive, pids))
    starter.kill()
    await starter.wait()
    await eventually(lambda: not any(map(alive, pids)), timeout_s=10)


@pytest.mark.multiproc
async def test_store_closed_leaves_no_process_and_no_file():
    store = ZmqDataStore(ZmqOptions(shards=1))
    assert isinstance(store, SupportsAttach)
    assert isinstance(store, SupportsDurability)
    async with store:
        pids, directory = store.processes.pids, store.processes.spec.directory
        assert there(directory)
        await store.register(TaskSpec("log", ("prompt_ids",)))
        await store.put(prompts(3), keys=[GroupKey(0, 0, i) for i in range(3)])
    assert not there(directory)
    assert not any(map(alive, pids))


@pytest.mark.multiproc
async def test_controller_killed_ends_waiting_calls_by_name():
    async with ZmqDataStore(ZmqOptions(shards=1)) as store:
        await store.register(TaskSpec("log", ("prompt_ids",)))
        waiting = asyncio.create_task(store.lease("log", requester="a", wait_s=60))
        await store.stats()
        os.kill(store.processes.pids[-1], signal.SIGKILL)
        with pytest.raises(PeerLostError):
            await waiting
        assert "controller" in await store.processes.ended()


@pytest.mark.multiproc
@pytest.mark.parametrize("bind", ["", "tcp://127.0.0.1:*", "tcp://[::1]:*"])
async def test_shard_added_while_running_takes_its_share(bind):
    log = TaskSpec("log", ("wide",))
    async with ZmqDataStore(ZmqOptions(shards=1, bind=bind)) as store:
        await store.register(log)
        other = ZmqDataStore(ZmqOptions(**store.attach_options()))
        async with other:
            await store.add_shard()
            for number in range(14):  # of 3 MiB each, so that extents change
                wide = Column.dense(np.full((1, 3 << 20), number), np.uint8)
                await store.put(Batch({"wide": wide}), keys=[GroupKey(0, 0, number)])
            lease = await other.lease("log", requester="a")
            batch = await other.read(lease.ref(), ["wide"])
            assert [int(row[-1]) for row in batch["wide"]] == list(range(14))
            await other.commit(lease.ref())
            with pytest.raises(ConfigError):
                await other.add_shard()
        spec = store.processes.spec
        assert [there_bytes(spec.arena(n)) > 2 << 20 for n in range(2)] == [True, True]


def there_bytes(path):
    return os.stat(path).st_blocks * 512


def test_options_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ValidationError, match="token"):
        ZmqOptions(connect="ipc:///nowhere")
    with pytest.raises(ValidationError):
        ZmqOptions(shards=0)


@pytest.mark.multiproc
async def test_store_without_durability_does_not_delete_the_rows_of_a_durable_one(tmp_path):
    kept = {"shards": 1, "directory": tmp_path / "kept"}
    async with ZmqDataStore(ZmqOptions(durability="journal", **kept)) as store:
        await store.register(TaskSpec("log", ("prompt_ids",)))
        await store.put(prompts(2), keys=[GroupKey(0, 0, 0), GroupKey(0, 0, 1)])
    with pytest.raises(ConfigError, match="holds the rows of a durable store"):
        await ZmqDataStore(ZmqOptions(**kept)).open()
    async with ZmqDataStore(ZmqOptions(durability="journal", **kept)) as store:
        stats = await store.stats()
        assert (stats.rows, stats.rows_dropped) == (2, {})


async def test_durable_store_without_directory_is_refused():
    store = ZmqDataStore(ZmqOptions(durability="journal"))
    with pytest.raises(ConfigError, match="directory"):
        await store.open()
    await store.aclose()


def test_journal_torn_at_any_byte_gives_every_whole_record(tmp_path):
    journal = Journal(tmp_path)
    records = [["put", i, "x" * i] for i in range(12)]
    ends = []
    for record in records:
        journal.append([record])
        ends.append(journal.nbytes)
    journal.close()
    whole = (tmp_path / "journal-1").read_bytes()
    for size in range(8, len(whole) + 1):
        (tmp_path / "journal-1").write_bytes(whole[:size])
        again = Journal(tmp_path)
        assert list(again.read()) == records[: sum(end <= size for end in ends)]
        again.append([["more"]])
        assert list(again.read())[-1] == ["more"]
        again.close()


def test_journal_with_a_flipped_byte_is_refused(tmp_path):
    journal = Journal(tmp_path)
    journal.append([["a"], ["b"], ["c"]])
    journal.close()
    path = tmp_path / "journal-1"
    data = bytearray(path.read_bytes())
    data[8 + 12 + 3 + 12] ^= 1  # in the body of the second record
    path.write_bytes(data)
    with pytest.raises(DataError, match="at byte 23: a record is damaged"):
        list(Journal(tmp_path).read())
    path.write_bytes(b"something else")
    with pytest.raises(DataError, match="not the journal"):
        list(Journal(tmp_path).read())


def test_journal_rewritten_counts_once_it_is_whole(tmp_path):
    journal = Journal(tmp_path)
    journal.append([["a"], ["b"]])
    journal.rewrite([["c"]])
    journal.append([["d"]])
    journal.close()
    (tmp_path / "journal-3.new").write_bytes(b"half")
    assert list(Journal(tmp_path).read()) == [["c"], ["d"]]
    assert [path.name for path in tmp_path.iterdir()] == ["journal-2"]
