from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncflow_core.batch import Batch, BatchRef, Column, GroupKey, Key
from asyncflow_core.errors import (
    ConfigError,
    PluginIncompatibleError,
    ServiceClosedError,
    ServiceTimeoutError,
    UnsupportedCapabilityError,
    WireDecodeError,
)
from asyncflow_core.services.data_store import (
    CommitResult,
    DataStore,
    Lease,
    PutResult,
    Registration,
    RowInfo,
    StoreStats,
    TaskSpec,
)
from asyncflow_core.services.rollout import (
    Completion,
    GenerateRequest,
    Rollout,
    RolloutStats,
    SamplingParams,
    StagedWeights,
    SupportsPause,
    SwitchMode,
)
from asyncflow_core.services.weight_sync import WeightManifest, WeightSource
from asyncflow_core.wire import Client, Server, remote, serve_object, serve_service

TOKEN = "token-of-this-run"


class FakeStore(DataStore):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.open_registrations = 0
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def register(self, task: TaskSpec) -> Registration:
        if task.name == "bad":
            raise ConfigError(["first fault", "second fault"])
        self.open_registrations += 1

        async def end() -> None:
            self.open_registrations -= 1

        return Registration(task, end)

    async def put(
        self,
        groups: Batch,
        *,
        keys: Sequence[GroupKey],
        samples: int = 1,
        batch: int | None = None,
        partition: str = "train",
        row_bytes: int = 0,
        wait_s: float | None = None,
    ) -> PutResult:
        self.asked.append((groups, keys, samples, batch, partition, row_bytes, wait_s))
        return PutResult(len(keys), 0)

    async def lease(self, task: str, *, requester: str, **kwargs: Any) -> Lease | None:
        if task == "none":
            return None
        if task == "forever":
            self.waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        return Lease(1, task, requester, 1, 60.0, (RowInfo(5, Key(0, 0, 1, 0), tokens=3),))

    async def read(self, ref: BatchRef, columns: Sequence[str]) -> Batch:
        rows = [np.full(300, row, np.int32) for row in ref.rows]
        return Batch({name: Column.ragged(rows) for name in columns})

    async def renew(self, leases: Sequence[int], *, lease_s: float) -> tuple[int, ...]:
        return tuple(leases)

    async def commit(
        self, ref: BatchRef, *, writes: Batch | None = None, version: int | None = None
    ) -> CommitResult:
        self.asked.append(writes)
        return CommitResult(len(ref.rows))

    async def release(self, ref: BatchRef) -> None:
        self.asked.append(ref)

    async def drop(self, keys: Sequence[Key], *, reason: str) -> int:
        return len(keys)

    async def stats(self, *, drops_after: int = 0, wait_s: float = 0.0) -> StoreStats:
        return StoreStats(rows=drops_after)


class FakeRollout(Rollout):
    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        try:
            for request in requests:
                ids = request.prompt_ids
                versions = np.array([[0, len(ids)]], np.int32)
                yield Completion(request.key, ids, ids.astype(np.float32), versions, "stop")
        finally:
            self.closed.set()

    async def stage_weights(self, source: WeightSource) -> StagedWeights:
        raise AssertionError

    async def commit_weights(self, version: int, mode: SwitchMode) -> None:
        assert mode is SwitchMode.DRAIN

    async def abort(self, keys: Sequence[Key] | None = None) -> int:
        return -1 if keys is None else len(keys)

    async def stats(self) -> RolloutStats:
        return RolloutStats(version=3)


class PausingRollout(FakeRollout):
    paused = False

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False


class Control:
    """A control interface of the flow, as any class."""

    def __init__(self, base: int) -> None:
        self.base = base

    async def add(self, number: int, *, twice: bool = False) -> int:
        return self.base + number * (2 if twice else 1)

    async def ticks(self, upto: int) -> AsyncIterator[int]:
        for tick in range(upto):
            yield tick

    async def open(self) -> str:
        return "opened over there"

    def local(self) -> int:
        return 1


class Bed:
    """A server to be filled, then a client of it."""

    def __init__(self, address: str) -> None:
        self.server = Server(address, name="node-0", token=TOKEN)
        self.clients: list[Client] = []

    async def client(self, name: str = "worker-0", timeout_s: float = 20) -> Client:
        if not self.clients:
            await self.server.open()
        client = Client(self.server.address, name=name, token=TOKEN, timeout_s=timeout_s)
        await client.open()
        self.clients.append(client)
        return client


@pytest.fixture
async def bed(run_dir: Path) -> AsyncIterator[Bed]:
    made = Bed(f"ipc://{run_dir}/s")
    yield made
    for client in made.clients:
        await client.aclose()
    await made.server.aclose()


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
async def proxy(bed: Bed, store: FakeStore) -> DataStore:
    serve_service(bed.server, "store", store, DataStore)
    made = remote(DataStore, await bed.client(), "store")
    await made.open()
    return made


async def test_proxy_is_a_data_store_with_its_signatures(proxy: DataStore) -> None:
    assert isinstance(proxy, DataStore)
    assert inspect.signature(proxy.put) == inspect.signature(FakeStore().put)
    assert inspect.iscoroutinefunction(proxy.put)


async def test_arguments_and_results_arrive_typed(proxy: DataStore, store: FakeStore) -> None:
    groups = Batch({"prompt_ids": Column.ragged([np.arange(400, dtype=np.int32)] * 2)})
    keys = [GroupKey(0, 0, 1), GroupKey(0, 0, 2)]
    assert await proxy.put(groups, keys=keys, batch=3, row_bytes=7) == PutResult(2, 0)
    stored, *others = store.asked[0]
    assert others == [tuple(keys), 1, 3, "train", 7, None]
    np.testing.assert_array_equal(stored["prompt_ids"].array, groups["prompt_ids"].array)
    lease = await proxy.lease("train", requester="w")
    assert lease == Lease(1, "train", "w", 1, 60.0, (RowInfo(5, Key(0, 0, 1, 0), tokens=3),))
    read = await proxy.read(lease.ref(), ["a", "b"])
    assert list(read) == ["a", "b"]
    assert await proxy.commit(lease.ref(), writes=read, version=2) == CommitResult(1)
    assert await proxy.renew([1, 2], lease_s=5) == (1, 2)
    assert await proxy.drop([Key(0, 0, 1, 0)], reason="r") == 1
    assert await proxy.stats(drops_after=4) == StoreStats(rows=4)
    assert await proxy.lease("none", requester="w") is None
    assert await proxy.release(lease.ref()) is None


async def test_use_before_open_and_after_close_is_a_service_closed_error(
    bed: Bed, store: FakeStore
) -> None:
    serve_service(bed.server, "store", store, DataStore)
    proxy = remote(DataStore, await bed.client(), "store")
    with pytest.raises(ServiceClosedError):
        await proxy.stats()
    async with proxy:
        await proxy.stats()
    with pytest.raises(ServiceClosedError):
        await proxy.stats()
    await proxy.aclose()


async def test_wrong_arguments_are_a_type_error_here_and_a_decode_error_there(
    proxy: DataStore, bed: Bed
) -> None:
    call: Any = proxy.stats
    for args, kwargs in [((1,), {}), ((), {"nope": 1})]:
        with pytest.raises(TypeError, match="takes"):
            await call(*args, **kwargs)
    with pytest.raises(WireDecodeError, match="drops_after: got str 'x', allowed: int"):
        await call(drops_after="x")
    with pytest.raises(WireDecodeError, match=r"arguments \['nope'\] were given"):
        await bed.clients[0].call("store.stats", {"nope": 1})
    with pytest.raises(WireDecodeError, match="were given"):
        await bed.clients[0].call("store.stats", {Key(0, 0, 0, 0): 1})


async def test_faults_of_a_config_error_stay_apart(proxy: DataStore) -> None:
    with pytest.raises(ConfigError) as caught:
        await proxy.register(TaskSpec("bad", ()))
    assert caught.value.faults == ("store.register: first fault", "second fault")


async def test_waiting_lengthens_the_deadline(bed: Bed, store: FakeStore) -> None:
    serve_service(bed.server, "store", store, DataStore)
    proxy = remote(DataStore, await bed.client(timeout_s=0.05), "store")
    loop = asyncio.get_running_loop()
    async with proxy:
        begin = loop.time()
        with pytest.raises(ServiceTimeoutError):
            await proxy.lease("forever", requester="w", wait_s=0.2)
        assert loop.time() - begin >= 0.24


async def test_cancelled_call_of_a_proxy_cancels_the_service(
    proxy: DataStore, store: FakeStore
) -> None:
    call = asyncio.create_task(proxy.lease("forever", requester="w", wait_s=100))
    await asyncio.wait_for(store.waiting.wait(), 10)
    call.cancel()
    await asyncio.wait_for(store.cancelled.wait(), 10)


async def test_registration_ends_once_by_its_close(proxy: DataStore, store: FakeStore) -> None:
    registration = await proxy.register(TaskSpec("t", ("a",)))
    other = await proxy.register(TaskSpec("t", ("a",)))
    assert registration.task == TaskSpec("t", ("a",))
    assert store.open_registrations == 2
    await registration.aclose()
    await registration.aclose()
    assert store.open_registrations == 1
    await other.aclose()
    assert store.open_registrations == 0


async def test_restarted_worker_takes_over_its_registration(
    bed: Bed, proxy: DataStore, store: FakeStore
) -> None:
    await proxy.register(TaskSpec("t", ("a",)))
    await bed.clients[0].aclose()
    assert store.open_registrations == 1
    again = remote(DataStore, await bed.client("worker-0"), "store")
    await again.open()
    registration = await again.register(TaskSpec("t", ("a",)))
    assert store.open_registrations == 1
    await registration.aclose()
    assert store.open_registrations == 0


async def test_registration_of_a_lost_server_closes_quietly(bed: Bed, proxy: DataStore) -> None:
    registration = await proxy.register(TaskSpec("t", ("a",)))
    await bed.server.aclose()
    await registration.aclose()


async def test_generate_streams_completions(bed: Bed) -> None:
    rollout = FakeRollout()
    serve_service(bed.server, "rollout", rollout, Rollout)
    async with remote(Rollout, await bed.client(), "rollout") as proxy:
        ids = np.arange(600, dtype=np.int32)
        requests = [
            GenerateRequest(Key(0, 0, i, 0), ids[: i + 1], SamplingParams(), i) for i in range(50)
        ]
        found = [completion async for completion in proxy.generate(requests)]
        assert [c.key.sequence for c in found] == list(range(50))
        np.testing.assert_array_equal(found[49].response_ids, ids[:50])
        rollout.closed.clear()
        async for _ in proxy.generate(requests):
            break
        await asyncio.wait_for(rollout.closed.wait(), 10)
        await proxy.commit_weights(1, SwitchMode.DRAIN)
        assert await proxy.abort() == -1


async def test_method_with_an_iterator_inside_is_refused_in_words(bed: Bed) -> None:
    serve_service(bed.server, "rollout", FakeRollout(), Rollout)
    async with remote(Rollout, await bed.client(), "rollout") as proxy:
        with pytest.raises(UnsupportedCapabilityError, match="worker in the service's own process"):
            await proxy.stage_weights(WeightSource(WeightManifest(0, 0, (), "", 0), path="/x"))


async def test_declared_protocol_crosses_and_a_missing_one_is_refused(bed: Bed) -> None:
    pausing = PausingRollout()
    serve_service(bed.server, "a", pausing, Rollout, supports=[SupportsPause])
    serve_service(bed.server, "b", FakeRollout(), Rollout, supports=[SupportsPause])
    client = await bed.client()
    proxy = remote(Rollout, client, "a", supports=[SupportsPause])
    assert isinstance(proxy, SupportsPause)
    async with proxy:
        await proxy.pause()
    assert pausing.paused
    with pytest.raises(UnsupportedCapabilityError, match="no SupportsPause"):
        remote(Rollout, client, "b", supports=[SupportsPause])


async def test_plain_object_is_served_by_its_annotations(bed: Bed) -> None:
    serve_object(bed.server, "control", Control(10))
    proxy = remote(Control, await bed.client(), "control")
    assert await proxy.add(1) == 11
    assert await proxy.add(number=2, twice=True) == 14
    assert [tick async for tick in proxy.ticks(3)] == [0, 1, 2]
    assert await proxy.open() == "opened over there"


async def test_what_is_not_served_or_something_else_is_refused_in_words(
    bed: Bed, store: FakeStore
) -> None:
    with pytest.raises(ConfigError, match="is a FakeStore, not a Rollout"):
        serve_service(bed.server, "store", store, Rollout)  # type: ignore[misc]
    serve_service(bed.server, "store", store, DataStore)
    client = await bed.client()
    with pytest.raises(ConfigError, match=r"'node-0' serves no 'stor' \(there are: \['store'\]\)"):
        remote(DataStore, client, "stor")
    with pytest.raises(ConfigError, match="is a DataStore, not a Rollout"):
        remote(Rollout, client, "store")


async def test_api_version_two_apart_is_refused_and_says_which_side_to_upgrade(
    bed: Bed, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_service(bed.server, "store", store, DataStore)
    client = await bed.client()
    monkeypatch.setattr(DataStore, "API_VERSION", DataStore.API_VERSION + 2)
    with pytest.raises(PluginIncompatibleError, match="upgrade asyncflow-core at 'node-0'"):
        remote(DataStore, client, "store")


async def test_parameter_without_a_type_cannot_be_served(bed: Bed) -> None:
    class Untyped:
        async def go(self, anything):  # type: ignore[no-untyped-def]
            return anything

    with pytest.raises(
        ConfigError, match=r"Untyped\.go cannot be served: its parameter 'anything'"
    ):
        serve_object(bed.server, "x", Untyped())
