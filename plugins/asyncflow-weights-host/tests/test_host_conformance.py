import pytest

from asyncflow_core.parts import PartContext
from asyncflow_core.testing.weight_sync import WeightSyncTests
from asyncflow_weights_host.options import HostOptions
from asyncflow_weights_host.plugin import _capabilities
from asyncflow_weights_host.service import HostWeightSync


class TestHost(WeightSyncTests):
    @pytest.fixture(params=[1, 2, 3])
    def options(self, request):
        return HostOptions(versions=request.param)

    @pytest.fixture
    def capabilities(self, options):
        return _capabilities(options)

    @pytest.fixture
    async def service(self, options, tmp_path):
        async with HostWeightSync(options, PartContext("trainer", run_dir=tmp_path)) as made:
            yield made

    @pytest.fixture
    async def replica(self, options, tmp_path):
        async with HostWeightSync(options, PartContext("rollout", run_dir=tmp_path)) as made:
            yield made

    @pytest.fixture
    def unopened(self, options, tmp_path):
        return HostWeightSync(options, PartContext("x", run_dir=tmp_path))
