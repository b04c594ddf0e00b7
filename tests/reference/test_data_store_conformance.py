"""The in-process store holds the DataStore contract, and the kit covers the whole of it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from asyncflow_core.reference.data_store import InProcessDataStore
from asyncflow_core.testing.data_store import BYTES, ROWS, STALENESS, DataStoreTests


class TestInProcessDataStore(DataStoreTests):
    @pytest.fixture
    async def service(self):
        store = InProcessDataStore(
            capacity_rows=ROWS, capacity_bytes=BYTES, max_staleness=STALENESS
        )
        async with store:
            yield store


def test_kit_clauses_and_spec_clauses_agree():
    spec = Path(__file__).parents[2] / "docs/spec/data_store.md"
    numbered = set(re.findall(r"\*\*(DS-\d+)\*\*", spec.read_text()))
    tests = [f for n, f in inspect.getmembers(DataStoreTests) if n.startswith("test_")]
    cited = {clause for test in tests for clause in re.findall(r"DS-\d+", test.__doc__ or "")}
    assert cited == numbered
