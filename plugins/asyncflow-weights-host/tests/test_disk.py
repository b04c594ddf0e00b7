"""The transport over files beyond the contract."""

import asyncio

from asyncflow_core.parts import PartContext
from asyncflow_core.testing.aio import stream
from asyncflow_core.testing.weight_sync import random_buckets
from asyncflow_weights_host.disk_service import DiskWeightSync
from asyncflow_weights_host.options import DiskOptions


async def test_attach_or_fetch_that_is_cancelled_keeps_no_version_on_the_disk(tmp_path):
    context = PartContext("weights", run_dir=tmp_path)
    async with (
        DiskWeightSync(DiskOptions(), context) as trainer,
        DiskWeightSync(DiskOptions(), context) as replica,
    ):
        published = await trainer.publish(1, 0, stream(random_buckets(1)))
        for call in (lambda: replica.attach("r", published), lambda: replica.fetch(published)):
            task = asyncio.ensure_future(call())
            await asyncio.sleep(0)  # its thread has begun
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await trainer.retire(1)
        assert not list(tmp_path.rglob("*.safetensors"))
