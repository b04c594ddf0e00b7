import asyncio
from dataclasses import replace

import pytest

from asyncflow_core.errors import DataError, ServiceClosedError, ServiceError
from asyncflow_core.parts import PartContext
from asyncflow_core.reference.weight_sync import MemoryWeightSync
from asyncflow_core.registry import NoOptions
from asyncflow_core.services.weight_sync import TensorSpec, check_tensors
from asyncflow_core.testing.aio import collect, manifest_of, stream
from asyncflow_core.testing.weight_sync import random_buckets


@pytest.fixture
async def weights():
    async with MemoryWeightSync(NoOptions(), PartContext(name="weights")) as service:
        yield service


def publish(weights, version, life=0):
    return weights.publish(version, life, stream(random_buckets(version)))


async def test_fetched_source_outlives_retire_and_is_read_only(weights):
    published = await publish(weights, 1)
    source = await weights.fetch(published)
    await weights.retire(1)
    received = await collect(source.buckets)
    assert manifest_of(received, 1) == published.manifest
    assert not any(bucket.data.flags.writeable for bucket in received)
    with pytest.raises(ServiceError, match="retired"):
        await weights.fetch(published)


async def test_attach_from_another_process_or_transport_refused(weights):
    published = await publish(weights, 1)
    for changed in (
        replace(published, locator={**published.locator, "pid": -1}),
        replace(published, transport="host"),
    ):
        with pytest.raises(ServiceError, match="replica 'rollout-0' cannot reach version 1"):
            await weights.attach("rollout-0", changed)


async def test_version_of_two_lives_held_and_retired_apart(weights):
    first, second = await publish(weights, 1, 0), await publish(weights, 1, 1)
    assert first.manifest.life != second.manifest.life
    assert (await weights.stats()).versions == (1,)
    await weights.retire(1)
    with pytest.raises(ServiceError, match="life 0 is retired"):
        await weights.fetch(first)
    assert (await weights.fetch(second)).manifest == second.manifest
    await weights.retire(1, 1)
    assert (await weights.stats()).versions == ()


async def test_aclose_frees_and_refuses_a_publish_that_waits(weights):
    published = await publish(weights, 1)
    await publish(weights, 2)
    waiting = asyncio.ensure_future(publish(weights, 3))
    await asyncio.sleep(0)
    await weights.aclose()
    with pytest.raises(ServiceClosedError):
        await waiting
    async with MemoryWeightSync(NoOptions(), PartContext()) as other:
        with pytest.raises(ServiceError, match="retired"):
            await other.attach("rollout-0", published)


def test_check_tensors_names_the_first_difference():
    one = TensorSpec("a", "F32", (2, 3))
    check_tensors([replace(one, offset=64)], [one])
    for found, message in (
        ([], "'a' is missing"),
        ([one, TensorSpec("b", "F32", (1,))], "'b', which the model has not"),
        ([replace(one, dtype="F64")], r"'a' is F64 \[2, 3\] in the weights, F32 \[2, 3\]"),
        ([replace(one, shape=(3, 2))], r"'a' is F32 \[3, 2\]"),
    ):
        with pytest.raises(DataError, match=message):
            check_tensors(found, [one])
