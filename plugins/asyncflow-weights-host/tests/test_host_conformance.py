import pytest

from asyncflow_core.parts import PartContext
from asyncflow_core.testing.weight_sync import WeightSyncTests
from asyncflow_weights_host import plugin
from asyncflow_weights_host.disk_service import DiskWeightSync
from asyncflow_weights_host.options import DiskOptions, HostOptions, ZmqOptions
from asyncflow_weights_host.service import HostWeightSync
from asyncflow_weights_host.zmq_service import ZmqWeightSync


class _Transport(WeightSyncTests):
    kind = None
    capabilities_of = None

    @pytest.fixture
    def capabilities(self, options):
        return type(self).capabilities_of(options)

    @pytest.fixture
    async def service(self, options, tmp_path):
        async with self.kind(options, PartContext("trainer", run_dir=tmp_path)) as made:
            yield made

    @pytest.fixture
    async def replica(self, options, tmp_path):
        async with self.kind(options, PartContext("rollout", run_dir=tmp_path)) as made:
            yield made

    @pytest.fixture
    def unopened(self, options, tmp_path):
        return self.kind(options, PartContext("x", run_dir=tmp_path))


class TestHost(_Transport):
    kind = HostWeightSync
    capabilities_of = staticmethod(plugin._capabilities)

    @pytest.fixture(params=[1, 2, 3])
    def options(self, request):
        return HostOptions(versions=request.param)


class TestZmq(_Transport):
    kind = ZmqWeightSync
    capabilities_of = staticmethod(plugin._zmq_capabilities)

    @pytest.fixture(params=["ipc", "tcp", "delta"])
    def options(self, request):
        listen = "tcp://127.0.0.1:*" if request.param == "tcp" else "ipc"
        return ZmqOptions(listen=listen, delta=request.param == "delta", stall_s=3)


class TestDisk(_Transport):
    kind = DiskWeightSync
    capabilities_of = staticmethod(plugin._disk_capabilities)

    @pytest.fixture(params=["path", "buckets"])
    def options(self, request):
        return DiskOptions(source=request.param, shard_bytes=1 << 10)
