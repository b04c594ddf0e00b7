"""A journal that cannot be written: nothing that was answered is lost, and nothing else is."""

from __future__ import annotations

import contextlib
import resource

import pytest

from asyncflow_core.batch import GroupKey
from asyncflow_core.errors import ServiceError
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.data_store import prompts
from asyncflow_store_zmq.journal import Journal
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

LOG = TaskSpec("log", ("prompt_ids",))


@contextlib.contextmanager
def full_at(nbytes):
    """No file grows beyond a size."""
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, allowed[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)


def test_record_that_does_not_fit_leaves_no_part_of_it(tmp_path):
    journal = Journal(tmp_path)
    journal.append([["first", 1]])
    with full_at(journal.nbytes + 10), pytest.raises(OSError, match="large"):
        journal.append([["second", "x" * 100]])
    journal.append([["third", 3]])
    with full_at(100), pytest.raises(OSError, match="large"):
        journal.rewrite([["x" * 200]])
    assert list(journal.read()) == [["first", 1], ["third", 3]]
    journal.close()
    again = Journal(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["journal-1"]
    assert list(again.read()) == [["first", 1], ["third", 3]]
    again.close()


@pytest.mark.parametrize("durability", ["journal", "fsync"])
async def test_store_whose_disk_is_full_refuses_all_and_keeps_what_it_answered(
    serve, tmp_path, durability
):
    async with serve(durability=durability) as options, ZmqDataStore(ZmqOptions(**options)) as one:
        await one.register(LOG)
        await one.put(prompts(3), keys=[GroupKey(0, 0, i) for i in range(3)])
        (journal,) = tmp_path.glob("journal-*")
        with full_at(journal.stat().st_size + 10):
            for _ in range(2):
                with pytest.raises(ServiceError, match="make room"):
                    await one.register(TaskSpec("more", ("prompt_ids",)))
        with pytest.raises(ServiceError, match="make room"):
            await one.put(prompts(1), keys=[GroupKey(1, 0, 0)])
    async with serve(durability=durability) as options, ZmqDataStore(ZmqOptions(**options)) as one:
        await one.register(LOG)
        stats = await one.stats()
        assert (stats.rows, list(stats.tasks)) == (3, ["log"])
        lease = await one.lease("log", requester="a")
        batch = await one.read(lease.ref(), ["prompt_ids"])
        assert [len(ids) for ids in batch["prompt_ids"]] == [1, 2, 3]
