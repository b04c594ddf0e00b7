"""A lease policy of another plugin orders what the controller's process hands out."""

from __future__ import annotations

import os

import pytest

from asyncflow_core.batch import GroupKey
from asyncflow_core.errors import PluginNotFoundError
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.data_store import prompts
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

POLICY = """\
from asyncflow_core import hookimpl

class Last:
    window = 64

    def order(self, candidates, *, requester, holders):
        return list(reversed(candidates))

@hookimpl
def asyncflow_register(registrar):
    registrar.add("lease_policy", "last", lambda options, ctx: Last(), api_version=1)
"""


@pytest.mark.multiproc
async def test_controller_hands_out_by_the_policy_of_a_plugin(tmp_path, monkeypatch):
    info = tmp_path / "af_last-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: af-last\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[asyncflow]\nlease_policy.last = af_last\n")
    (tmp_path / "af_last.py").write_text(POLICY)
    known = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{known}" if known else str(tmp_path))
    async with ZmqDataStore(ZmqOptions(shards=1, lease_policies=("last",))) as store:
        assert "last" in store.capabilities.lease_policies
        await store.register(TaskSpec("log", ("prompt_ids",)))
        await store.put(prompts(3), keys=[GroupKey(0, 0, number) for number in range(3)])
        lease = await store.lease("log", requester="a", limit_rows=3, policy="last")
        assert [info.key.sequence for info in lease.rows] == [2, 1, 0]


@pytest.mark.multiproc
async def test_store_with_an_unknown_policy_says_so():
    with pytest.raises(PluginNotFoundError, match="nobody_knows"):
        await ZmqDataStore(ZmqOptions(shards=1, lease_policies=("nobody_knows",))).open()
