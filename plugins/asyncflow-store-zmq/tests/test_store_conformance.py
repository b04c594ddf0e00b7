"""The store holds the DataStore contract: by shared memory, by sockets, in its own processes."""

from __future__ import annotations

import pytest

from asyncflow_core.testing.data_store import BYTES, ROWS, STALENESS, DataStoreTests
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

SMALL = {"capacity_rows": ROWS, "capacity_bytes": BYTES, "max_staleness": STALENESS}


class TestOverSharedMemory(DataStoreTests):
    @pytest.fixture
    async def service(self, serve):
        async with serve(**SMALL) as options, ZmqDataStore(ZmqOptions(**options)) as store:
            yield store


class TestOverTcp(DataStoreTests):
    @pytest.fixture
    async def service(self, serve):
        options = serve(tcp=True, shards=2, **SMALL)
        async with options as options, ZmqDataStore(ZmqOptions(**options)) as store:
            yield store


class TestDurable(DataStoreTests):
    @pytest.fixture
    async def service(self, serve):
        options = serve(durability="journal", **SMALL)
        async with options as options, ZmqDataStore(ZmqOptions(**options)) as store:
            yield store


@pytest.mark.slow
@pytest.mark.multiproc
class TestInProcesses(DataStoreTests):
    @pytest.fixture
    async def service(self):
        async with ZmqDataStore(ZmqOptions(**SMALL)) as store:
            yield store
