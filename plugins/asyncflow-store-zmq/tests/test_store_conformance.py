"""The store in processes of its own holds the DataStore contract."""

from __future__ import annotations

import pytest
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

from asyncflow_core.testing.data_store import BYTES, ROWS, STALENESS, DataStoreTests

SMALL = {"capacity_rows": ROWS, "capacity_bytes": BYTES, "max_staleness": STALENESS, "shards": 1}


class TestOverSharedMemory(DataStoreTests):
    @pytest.fixture
    async def service(self):
        async with ZmqDataStore(ZmqOptions(**SMALL)) as store:
            yield store


class TestOverTcp(DataStoreTests):
    @pytest.fixture
    async def service(self):
        options = ZmqOptions(**{**SMALL, "shards": 2}, bind="tcp://127.0.0.1:*")
        async with ZmqDataStore(options) as store:
            yield store
