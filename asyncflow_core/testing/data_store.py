"""Conformance kit: every DataStore passes `DataStoreTests`.

    class TestMyStore(DataStoreTests):
        @pytest.fixture
        async def service(self):
            async with MyStore(capacity_rows=64, capacity_bytes=1 << 20, max_staleness=1) as store:
                yield store

The store under test is opened, empty, with exactly these capacities. Clauses (DS-n) are those of
`docs/spec/data_store.md`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column, GroupKey, Key
from asyncflow_core.errors import (
    BackpressureError,
    ConfigError,
    DataError,
    LeaseLostError,
    ServiceClosedError,
    ServiceTimeoutError,
    UnsupportedCapabilityError,
)
from asyncflow_core.services.data_store import (
    DataStore,
    Lease,
    Order,
    SupportsEviction,
    TaskSpec,
)
from asyncflow_core.testing.aio import eventually

__all__ = ["DataStoreTests"]

ROWS, BYTES, STALENESS = 64, 1 << 20, 1
SHORT_S = 0.05  # a life or a wait that is meant to end
LONG_S = 30.0  # one that is not

GENERATE = TaskSpec(
    "generate",
    ("prompt_ids",),
    ("response_ids", "behaviour_logprobs", "versions"),
    order=Order.ADMITTED,
)
SCORE = TaskSpec("score", ("response_ids", "answer"), ("reward",))
TRAIN = TaskSpec("train", ("response_ids", "reward"), order=Order.STEP, whole_groups=True)


def prompts(count: int) -> Batch:
    """`count` prompts, the i-th of i + 1 tokens, each with an answer."""
    return Batch(
        {
            "prompt_ids": Column.ragged([np.arange(i + 1) for i in range(count)], np.int32),
            "answer": Column.objects([{"text": str(i)} for i in range(count)]),
        }
    )


def responses(count: int, length: int = 3) -> Batch:
    """What GENERATE writes."""
    return Batch(
        {
            "response_ids": Column.ragged([np.arange(length)] * count, np.int32),
            "behaviour_logprobs": Column.ragged([np.full(length, -0.5)] * count, np.float32),
            "versions": Column.ragged([[[0, length]]] * count, np.int32),
        }
    )


def rewards(count: int) -> Batch:
    """What SCORE writes."""
    return Batch({"reward": Column.dense(np.ones(count), np.float32)})


class DataStoreTests:
    """The contract at the public interface; a subclass gives the `service` fixture."""

    # What tests say over and over

    async def put(
        self, store: DataStore, *sequences: int, samples: int = 1, **kwargs: Any
    ) -> Sequence[GroupKey]:
        """Put prompt groups of batch 0."""
        keys = [GroupKey(0, 0, sequence) for sequence in sequences]
        await store.put(
            prompts(len(keys)), keys=keys, samples=samples, **{"batch": 0, "wait_s": 0.0, **kwargs}
        )
        return keys

    async def take(self, store: DataStore, task: TaskSpec, **kwargs: Any) -> Lease:
        """A lease that must be there."""
        version = None if task.order is Order.ANY else kwargs.pop("version", 0)
        kwargs = {"requester": "kit", "lease_s": LONG_S, "version": version, **kwargs}
        lease = await store.lease(task.name, **kwargs)
        assert lease is not None
        return lease

    async def none_for(self, store: DataStore, task: TaskSpec, **kwargs: Any) -> bool:
        """Whether nothing is handed out."""
        version = None if task.order is Order.ANY else kwargs.pop("version", 0)
        return await store.lease(task.name, requester="kit", version=version, **kwargs) is None

    async def generate(self, store: DataStore, **kwargs: Any) -> Lease:
        """Lease and commit what GENERATE can get."""
        lease = await self.take(store, GENERATE, **kwargs)
        await store.commit(lease.ref(), writes=responses(len(lease.rows)))
        return lease

    # Life cycle

    async def test_calls_after_close_raise_closed(self, service: DataStore) -> None:
        """DS-1."""
        await service.register(GENERATE)
        await self.put(service, 0, 1)
        lease = await self.take(service, GENERATE, limit_rows=1)
        ref, (key,) = lease.ref(), [info.key for info in lease.rows]
        for _ in range(2):
            await service.aclose()
            for call in (
                service.register(SCORE),
                self.put(service, 2),
                service.lease("generate", requester="kit", version=0),
                service.read(ref, ["prompt_ids"]),
                service.renew([ref.lease_id], lease_s=LONG_S),
                service.commit(ref, writes=responses(1)),
                service.release(ref),
                service.drop([key], reason="kit"),
                service.stats(),
            ):
                with pytest.raises(ServiceClosedError):
                    await call

    async def test_close_with_waiting_calls_ends_them(self, service: DataStore) -> None:
        """DS-2."""
        await service.register(GENERATE)
        await self.put(service, *range(ROWS))
        await self.take(service, GENERATE)
        waiting = [
            asyncio.create_task(service.lease("generate", requester="a", version=0, wait_s=LONG_S)),
            asyncio.create_task(self.put(service, 100, wait_s=None)),
            asyncio.create_task(self.put(service, 101, wait_s=None)),
            asyncio.create_task(service.stats(wait_s=LONG_S)),
        ]
        await self.until_waiting(service, puts=2)
        await service.aclose()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [ServiceClosedError] * 4

    async def until_waiting(self, store: DataStore, *, puts: int) -> None:
        """Until that many producers wait for room."""

        async def waiting() -> bool:
            return (await store.stats()).waiting_puts == puts

        await eventually(waiting)

    # Tasks

    async def test_register_equal_spec_joins_until_last_leaves(self, service: DataStore) -> None:
        """DS-3."""
        first = await service.register(GENERATE)
        second = await service.register(GENERATE)
        await self.put(service, 0)
        await first.aclose()
        await first.aclose()
        assert (await service.stats()).rows == 1
        await second.aclose()
        assert (await service.stats()).rows == 0

    async def test_register_other_spec_same_name_refused(self, service: DataStore) -> None:
        """DS-3."""
        await service.register(SCORE)
        with pytest.raises(ConfigError, match="'score'"):
            await service.register(TaskSpec("score", ("response_ids",), ("reward",)))

    async def test_register_second_writer_refused(self, service: DataStore) -> None:
        """DS-4."""
        await service.register(SCORE)
        with pytest.raises(ConfigError, match=r"'score'.*'judge'.*reward"):
            await service.register(TaskSpec("judge", ("response_ids",), ("reward",)))

    async def test_task_sees_later_rows_of_its_partitions_only(self, service: DataStore) -> None:
        """DS-5."""
        late = TaskSpec("late", ("prompt_ids",))
        await service.register(GENERATE)
        await service.register(TaskSpec("eval", ("prompt_ids",), partitions=("eval",)))
        await self.put(service, 0)
        await service.register(late)
        assert await self.none_for(service, late)
        await self.put(service, 1)
        await self.put(service, 2, batch=None, partition="eval")
        assert [info.key.sequence for info in (await self.take(service, late)).rows] == [1]

    async def test_registration_end_voids_leases_and_frees_rows(self, service: DataStore) -> None:
        """DS-6."""
        log = TaskSpec("log", ("prompt_ids",))
        await service.register(GENERATE)
        registration = await service.register(log)
        await self.put(service, 0)
        await self.generate(service)
        lease = await self.take(service, log)
        assert (await service.stats()).rows == 1
        await registration.aclose()
        assert (await service.stats()).rows == 0
        with pytest.raises(LeaseLostError):
            await service.commit(lease.ref())

    # Put

    async def test_put_known_key_counted_even_after_free(self, service: DataStore) -> None:
        """DS-7."""
        await service.register(GENERATE)
        keys = await self.put(service, 0, 1)
        for _ in range(2):
            again = await service.put(prompts(2), keys=keys, batch=0)
            assert (again.stored, again.known) == (0, 2)
            if (await service.stats()).rows:
                await self.generate(service)
        assert (await service.stats()).rows_put == 2

    async def test_put_without_room_waits_and_resumes_in_order(self, service: DataStore) -> None:
        """DS-8."""
        await service.register(GENERATE)
        await self.put(service, *range(ROWS))
        large = asyncio.create_task(self.put(service, 100, samples=2, wait_s=None))
        await self.until_waiting(service, puts=1)
        small = asyncio.create_task(self.put(service, 101, wait_s=None))
        await self.until_waiting(service, puts=2)
        await self.generate(service, limit_rows=1)
        assert not small.done()  # there is room for it, but it is not its turn
        await self.generate(service, limit_rows=1)
        await large
        await self.generate(service, limit_rows=1)
        await small
        assert (await service.stats()).waiting_puts == 0

    async def test_put_without_room_times_out_and_may_be_repeated(self, service: DataStore) -> None:
        """DS-8."""
        await service.register(GENERATE)
        await self.put(service, 0, row_bytes=BYTES)
        with pytest.raises(ServiceTimeoutError):
            await self.put(service, 1, row_bytes=1, wait_s=SHORT_S)
        await self.generate(service)
        await self.put(service, 1, row_bytes=1)
        assert (await service.stats()).reserved_bytes == 1

    async def test_put_group_above_capacity_is_backpressure(self, service: DataStore) -> None:
        """DS-9."""
        await service.register(GENERATE)
        with pytest.raises(BackpressureError):
            await self.put(service, 0, samples=ROWS + 1)
        with pytest.raises(BackpressureError):
            await self.put(service, 0, row_bytes=BYTES + 1)

    async def test_put_against_schema_names_row_and_column(self, service: DataStore) -> None:
        """DS-10."""
        await service.register(GENERATE)
        bad = Batch({"prompt_ids": Column.ragged([[1], [-1]], np.int32)})
        with pytest.raises(DataError, match=r"0/0/8.*prompt_ids"):
            await service.put(bad, keys=[GroupKey(0, 0, 7), GroupKey(0, 0, 8)], batch=0)
        assert (await service.stats()).rows_put == 0

    async def test_put_that_could_never_move_is_refused(self, service: DataStore) -> None:
        """DS-11."""
        await service.register(GENERATE)
        await service.register(TRAIN)
        with pytest.raises(DataError, match="partition"):
            await self.put(service, 0, partition="trian")
        with pytest.raises(DataError, match="'train'"):
            await self.put(service, 0, batch=None)
        with pytest.raises(DataError, match="response_ids"):
            await service.put(responses(1), keys=[GroupKey(0, 0, 0)], batch=0)

    # Lease

    async def test_lease_before_all_columns_hands_out_nothing(self, service: DataStore) -> None:
        """DS-12."""
        await service.register(GENERATE)
        await service.register(SCORE)
        await self.put(service, 0)
        assert await self.none_for(service, SCORE)
        await self.generate(service)
        assert len((await self.take(service, SCORE)).rows) == 1

    async def test_lease_by_many_gives_each_row_once(self, service: DataStore) -> None:
        """DS-13."""
        await service.register(GENERATE)
        await service.register(SCORE)
        done: list[Key] = []

        async def produce(producer: int) -> None:
            for sequence in range(20):
                key = GroupKey(producer, 0, sequence)
                await service.put(prompts(1), keys=[key], samples=4, batch=0)

        async def consume(task: TaskSpec) -> None:
            version = 0 if task.order is Order.ADMITTED else None
            while len(done) < 240:
                lease = await service.lease(
                    task.name, requester="c", version=version, limit_rows=3, wait_s=SHORT_S
                )
                if lease is not None:
                    count = len(lease.rows)
                    writes = responses(count) if task is GENERATE else rewards(count)
                    await service.commit(lease.ref(), writes=writes)
                    if task is SCORE:
                        done.extend(info.key for info in lease.rows)

        await asyncio.gather(
            *(produce(producer) for producer in range(3)),
            *(consume(task) for task in (GENERATE, SCORE) for _ in range(3)),
        )
        assert len(done) == len(set(done)) == 240
        assert (await service.stats()).rows == 0

    async def test_lease_limits_bound_but_never_starve(self, service: DataStore) -> None:
        """DS-14."""
        await service.register(GENERATE)
        await self.put(service, 0, 1, 2, 3)  # of 1, 2, 3, 4 tokens
        assert len((await self.take(service, GENERATE, limit_tokens=3)).rows) == 2
        assert len((await self.take(service, GENERATE, limit_tokens=1)).rows) == 1
        assert len((await self.take(service, GENERATE, limit_rows=5)).rows) == 1

    async def test_lease_limit_below_group_hands_out_one_group(self, service: DataStore) -> None:
        """DS-14, DS-17."""
        whole = TaskSpec("whole", ("prompt_ids",), whole_groups=True)
        await service.register(whole)
        await self.put(service, 0, 1, samples=4)
        lease = await self.take(service, whole, limit_rows=3)
        assert [info.key.sequence for info in lease.rows] == [0] * 4

    async def test_admitted_hands_out_by_version_smallest_batch_first(
        self, service: DataStore
    ) -> None:
        """DS-15."""
        await service.register(GENERATE)
        await self.put(service, 2, batch=STALENESS + 1)
        await self.put(service, 1, batch=STALENESS)
        await self.put(service, 9, batch=None)
        first = await self.take(service, GENERATE, version=0)
        assert [info.batch for info in first.rows] == [None, STALENESS]
        assert await self.none_for(service, GENERATE, version=0)
        second = await self.take(service, GENERATE, version=1)
        assert [info.batch for info in second.rows] == [STALENESS + 1]

    async def test_step_hands_out_exactly_its_batch(self, service: DataStore) -> None:
        """DS-16."""
        step = TaskSpec("step", ("prompt_ids",), order=Order.STEP)
        await service.register(step)
        await self.put(service, 0, batch=1)
        await self.put(service, 1, batch=0)
        assert await self.none_for(service, step, version=2)
        assert [i.key.sequence for i in (await self.take(service, step, version=0)).rows] == [1]
        assert [i.key.sequence for i in (await self.take(service, step, version=1)).rows] == [0]

    async def test_whole_groups_wait_for_every_row(self, service: DataStore) -> None:
        """DS-17."""
        whole = TaskSpec("whole", ("response_ids",), whole_groups=True)
        await service.register(GENERATE)
        await service.register(whole)
        await self.put(service, 0, samples=3)
        await self.generate(service, limit_rows=2)
        assert await self.none_for(service, whole)
        await self.generate(service, limit_rows=1)
        assert len((await self.take(service, whole, limit_rows=1)).rows) == 3

    async def test_batch_groups_wait_for_the_whole_batch(self, service: DataStore) -> None:
        """DS-34: then all of it, what comes back too; rows outside batches do not wait."""
        whole = TaskSpec(
            "whole",
            ("response_ids",),
            whole_groups=True,
            partitions=("train", "eval"),
            batch_groups=2,
        )
        await service.register(GENERATE)
        await service.register(whole)
        await self.put(service, 0, samples=2, batch=0)
        await self.put(service, 1, samples=2, batch=0)
        await self.generate(service, limit_rows=3)
        assert await self.none_for(service, whole)
        await self.generate(service, limit_rows=1)
        lease = await self.take(service, whole, limit_rows=2)
        assert len(lease.rows) == 2
        await service.release(lease.ref())
        assert len((await self.take(service, whole, limit_rows=4)).rows) == 4

    async def test_waiting_lease_gets_row_as_it_becomes_ready(self, service: DataStore) -> None:
        """DS-18."""
        await service.register(GENERATE)
        await service.register(SCORE)
        waiting = asyncio.create_task(service.lease("score", requester="s", wait_s=LONG_S))
        await self.put(service, 0)
        await self.generate(service)
        lease = await asyncio.wait_for(waiting, LONG_S / 2)
        assert lease is not None
        assert len(lease.rows) == 1
        assert await self.none_for(service, SCORE, wait_s=SHORT_S)

    async def test_waiting_lease_cancelled_takes_no_row(self, service: DataStore) -> None:
        """DS-18."""
        await service.register(GENERATE)
        waiting = asyncio.create_task(
            service.lease("generate", requester="a", version=0, wait_s=LONG_S)
        )
        await service.stats()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await self.put(service, 0)
        assert len((await self.take(service, GENERATE)).rows) == 1

    async def test_fence_grows_over_leases(self, service: DataStore) -> None:
        """DS-19."""
        await service.register(GENERATE)
        await self.put(service, 0)
        fences = []
        for _ in range(3):
            lease = await self.take(service, GENERATE)
            fences.append(lease.fence)
            await service.release(lease.ref())
        assert fences == sorted(set(fences))

    async def test_lease_with_arguments_out_of_place_refused(self, service: DataStore) -> None:
        """DS-20."""
        await service.register(GENERATE)
        await service.register(SCORE)
        with pytest.raises(ConfigError):
            await service.lease("generate", requester="a")
        with pytest.raises(ConfigError):
            await service.lease("score", requester="a", version=0)
        with pytest.raises(ConfigError):
            await service.lease("nobody", requester="a")
        with pytest.raises(UnsupportedCapabilityError):
            await service.lease("score", requester="a", policy="none of ours")

    # Read

    async def test_read_returns_columns_of_every_kind_in_order(self, service: DataStore) -> None:
        """DS-21."""
        columns = {
            "prompt_ids": Column.ragged([[5], [6, 7]], np.int32),
            "image": Column.ragged([np.ones((2, 3)), np.zeros((0, 3))], np.float64),
            "weight": Column.dense([0.5, np.nan], np.float64),
            "box": Column.dense([[1, 2], [3, 4]], np.int8),
            "answer": Column.objects([None, {"a": [1, "b"]}]),
        }
        spec = TaskSpec("all", tuple(columns))
        await service.register(spec)
        await service.put(Batch(columns), keys=[GroupKey(0, 0, 0), GroupKey(0, 0, 1)], samples=2)
        lease = await self.take(service, spec)
        rows = [lease.rows[i] for i in (3, 0)]
        batch = await service.read(lease.ref(rows), spec.reads)
        want = Batch(columns).take([1, 0])
        assert set(batch) == set(columns)
        for name, column in want.items():
            assert batch[name].kind == column.kind
            if column.kind == "object":
                assert batch[name].values == column.values
            else:
                assert batch[name].array.dtype == column.array.dtype
                np.testing.assert_array_equal(batch[name].array, column.array)

    async def test_read_of_unread_column_refused(self, service: DataStore) -> None:
        """DS-21."""
        await service.register(GENERATE)
        await self.put(service, 0)
        lease = await self.take(service, GENERATE)
        with pytest.raises(DataError, match="answer"):
            await service.read(lease.ref(), ["answer"])

    async def test_read_of_rows_not_held_is_lease_lost(self, service: DataStore) -> None:
        """DS-22."""
        await service.register(GENERATE)
        await self.put(service, 0)
        lease = await self.take(service, GENERATE)
        await service.release(lease.ref())
        with pytest.raises(LeaseLostError):
            await service.read(lease.ref(), ["prompt_ids"])

    # Commit, release, renew

    async def test_commit_of_part_makes_its_columns_visible(self, service: DataStore) -> None:
        """DS-23."""
        await service.register(GENERATE)
        await service.register(SCORE)
        await self.put(service, 0, 1)
        lease = await self.take(service, GENERATE)
        await service.commit(lease.ref(lease.rows[1:]), writes=responses(1, length=5))
        scored = await self.take(service, SCORE)
        assert [info.key.sequence for info in scored.rows] == [1]
        assert scored.rows[0].tokens == 2 + 5
        batch = await service.read(scored.ref(), ["response_ids", "answer"])
        assert batch["response_ids"][0].tolist() == [0, 1, 2, 3, 4]
        assert batch["answer"][0] == {"text": "1"}

    async def test_commit_repeated_is_counted_and_writes_nothing(self, service: DataStore) -> None:
        """DS-24."""
        await service.register(GENERATE)
        await self.put(service, 0, 1)
        lease = await self.take(service, GENERATE)
        one = await service.commit(lease.ref(lease.rows[:1]), writes=responses(1))
        both = await service.commit(lease.ref(), writes=responses(2))
        again = await service.commit(lease.ref(), writes=responses(2))
        assert [(r.committed, r.repeated) for r in (one, both, again)] == [(1, 0), (1, 1), (0, 2)]
        assert (await service.stats()).rows_freed == 2

    async def test_commit_after_expiry_refused_and_rows_go_on(self, service: DataStore) -> None:
        """DS-25."""
        await service.register(GENERATE)
        await service.register(SCORE)
        await self.put(service, 0)
        old = await self.take(service, GENERATE, lease_s=SHORT_S)
        new = await self.take(service, GENERATE, wait_s=LONG_S)
        assert new.rows[0].key == old.rows[0].key
        with pytest.raises(LeaseLostError):
            await service.commit(old.ref(), writes=responses(1))
        assert await self.none_for(service, SCORE)
        await service.commit(new.ref(), writes=responses(1))
        assert (await service.stats()).tasks["generate"].expired == 1

    async def test_commit_against_spec_or_schema_writes_nothing(self, service: DataStore) -> None:
        """DS-26."""
        logprobs = TaskSpec("ref", ("response_ids",), ("ref_logprobs",))
        await service.register(GENERATE)
        await service.register(logprobs)
        await self.put(service, 0)
        lease = await self.take(service, GENERATE)
        short = responses(1).with_columns(
            {"behaviour_logprobs": Column.ragged([[0.5]], np.float32)}
        )
        for writes in (None, responses(2), rewards(1), short):
            with pytest.raises(DataError):
                await service.commit(lease.ref(), writes=writes)
        assert await self.none_for(service, logprobs)
        await service.commit(lease.ref(), writes=responses(1, length=3))
        lease = await self.take(service, logprobs)
        wrong = Batch({"ref_logprobs": Column.ragged([[0.0] * 4], np.float32)})
        with pytest.raises(DataError, match=r"0/0/0/0.*ref_logprobs.*4.*3"):
            await service.commit(lease.ref(), writes=wrong)

    async def test_release_gives_rows_back_to_the_front(self, service: DataStore) -> None:
        """DS-27."""
        await service.register(GENERATE)
        await self.put(service, 0, 1, 2)
        lease = await self.take(service, GENERATE, limit_rows=2)
        await service.release(lease.ref())
        await service.release(lease.ref())
        again = await self.take(service, GENERATE)
        assert [info.key.sequence for info in again.rows] == [0, 1, 2]

    async def test_renew_prolongs_and_names_the_lost(self, service: DataStore) -> None:
        """DS-28."""
        await service.register(GENERATE)
        await self.put(service, 0, 1)
        kept = await self.take(service, GENERATE, limit_rows=1, lease_s=1.0)
        lost = await self.take(service, GENERATE, limit_rows=1, lease_s=SHORT_S)
        assert await service.renew([kept.lease_id], lease_s=LONG_S) == ()
        await self.take(service, GENERATE, wait_s=LONG_S)  # the row of `lost`
        both = [kept.lease_id, lost.lease_id]
        assert await service.renew(both, lease_s=LONG_S) == (lost.lease_id,)
        await service.commit(kept.ref(), writes=responses(1))

    async def test_evict_ends_the_leases_of_the_gone_alone(self, service: DataStore) -> None:
        """DS-35."""
        if not isinstance(service, SupportsEviction):
            pytest.skip("does not offer SupportsEviction")
        await service.register(GENERATE)
        await self.put(service, 0, 1, 2)
        first = await self.take(service, GENERATE, limit_rows=1, requester="gone")
        other = await self.take(service, GENERATE, limit_rows=1)
        last = await self.take(service, GENERATE, limit_rows=1, requester="gone")
        assert await service.evict("gone") == 2
        assert await service.evict("gone") == 0
        for lease in (first, last):
            with pytest.raises(LeaseLostError):
                await service.commit(lease.ref(), writes=responses(1))
        again = await self.take(service, GENERATE)
        assert [info.key.sequence for info in again.rows] == [0, 2]
        await service.commit(other.ref(), writes=responses(1))

    async def test_row_freed_when_the_last_task_committed(self, service: DataStore) -> None:
        """DS-29."""
        log = TaskSpec("log", ("prompt_ids",))
        await service.register(GENERATE)
        await service.register(log)
        await self.put(service, 0)
        await self.generate(service)
        assert (await service.stats()).rows == 1
        await service.commit((await self.take(service, log)).ref())
        stats = await service.stats()
        assert (stats.rows, stats.bytes, stats.rows_freed) == (0, 0, 1)

    # Drop and stats

    async def test_drop_takes_rows_from_leases_too(self, service: DataStore) -> None:
        """DS-30."""
        await service.register(GENERATE)
        await service.register(SCORE)
        await self.put(service, 0, 1)
        lease = await self.take(service, GENERATE)
        gone = [Key(0, 0, 0, 0), Key(0, 0, 5, 0)]
        assert await service.drop(gone, reason="late: by 3 s") == 1
        result = await service.commit(lease.ref(), writes=responses(2))
        assert (result.committed, result.dropped) == (1, 1)
        assert len((await self.take(service, SCORE)).rows) == 1
        assert (await service.stats()).rows_dropped == {"late": 1}

    async def test_drop_of_unready_row_completes_smaller_group(self, service: DataStore) -> None:
        """DS-31."""
        whole = TaskSpec("whole", ("response_ids",), whole_groups=True)
        await service.register(GENERATE)
        await service.register(whole)
        await self.put(service, 0, samples=3)
        await self.generate(service, limit_rows=2)
        waiting = asyncio.create_task(service.lease("whole", requester="w", wait_s=LONG_S))
        await service.drop([Key(0, 0, 0, 2)], reason="late")
        lease = await waiting
        assert lease is not None
        assert [info.key.sample for info in lease.rows] == [0, 1]
        assert (await service.stats()).dropped_groups == ()

    async def test_stats_waits_for_the_next_dropped_group(self, service: DataStore) -> None:
        """DS-32."""
        await service.register(GENERATE)
        await self.put(service, 0, 1, samples=2)
        rows = [Key(0, 0, sequence, sample) for sequence in (0, 1) for sample in (0, 1)]
        waiting = asyncio.create_task(service.stats(wait_s=LONG_S))
        await service.drop(rows[:2], reason="late")
        (first,) = (await waiting).dropped_groups
        assert (first.serial, first.group, first.batch) == (1, GroupKey(0, 0, 0), 0)
        assert (first.partition, first.reason) == ("train", "late")
        waiting = asyncio.create_task(service.stats(drops_after=first.serial, wait_s=LONG_S))
        await service.drop(rows, reason="bad")
        (second,) = (await waiting).dropped_groups
        assert (second.serial, second.group) == (2, GroupKey(0, 0, 1))
        assert (await service.stats(drops_after=2, wait_s=SHORT_S)).dropped_groups == ()

    async def test_credit_is_all_back_when_store_is_empty(self, service: DataStore) -> None:
        """DS-33."""
        await service.register(GENERATE)
        await self.put(service, 0, 1, samples=3, row_bytes=100)
        stats = await service.stats()
        assert (stats.reserved_rows, stats.reserved_bytes) == (6, 600)
        assert (stats.capacity_rows, stats.capacity_bytes) == (ROWS, BYTES)
        await self.generate(service, limit_rows=4)
        await service.drop([Key(0, 0, 1, 1), Key(0, 0, 1, 2)], reason="late")
        stats = await service.stats()
        assert (stats.rows, stats.reserved_rows, stats.reserved_bytes) == (0, 0, 0)
