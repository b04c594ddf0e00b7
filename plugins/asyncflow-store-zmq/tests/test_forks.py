"""A child that was forked from a process with clients can use none of them, and harms none."""

from __future__ import annotations

import asyncio
import os
import traceback

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.errors import ServiceClosedError
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_store_zmq.blocking import BlockingStore
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

pytestmark = [pytest.mark.multiproc, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
LOG = TaskSpec("log", ("x",))


def put(store, number):
    batch = Batch({"x": Column.dense([number], np.float32)})
    return store.put(batch, keys=[GroupKey(0, 0, number)])


def in_a_child(function):
    """Run it in a forked process; its exit status."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def test_forked_child_is_told_to_open_a_client_of_its_own_and_the_parent_goes_on():
    async with ZmqDataStore(ZmqOptions(shards=1)) as owner:
        token = owner.attach_options()["token"]

        def use():
            with BlockingStore(owner.address, token=token) as store:
                store.register(LOG)
                reader = store.reader("log", ["x"], requester="r", limit_rows=1)
                writer = store.writer()
                put(store, 0)

                def child():
                    for call in (lambda: put(store, 1), lambda: next(reader), writer.flush):
                        with pytest.raises(ServiceClosedError, match="forked"):
                            call()
                    store.close()
                    asyncio.run(owned())
                    with BlockingStore(owner.address, token=token) as own:
                        put(own, 2)

                async def owned():
                    with pytest.raises(ServiceClosedError, match="forked"):
                        await owner.stats()
                    await owner.aclose()  # ends nothing that is not this process's

                assert in_a_child(child) == 0
                put(store, 3)
                return sorted(next(reader).batch["x"].array.item() for _ in range(3))

        assert await asyncio.to_thread(use) == [0, 2, 3]
        assert (await owner.stats()).rows_put == 3
