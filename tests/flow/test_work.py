"""What is done with leased rows."""

import asyncio
import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow_core.batch import Batch, Column, Key
from asyncflow_core.errors import (
    ConfigError,
    DataError,
    EngineError,
    InvariantError,
    ServiceError,
)
from asyncflow_core.flow.working.stage_work import stage_work, to_columns
from asyncflow_core.flow.working.work import (
    ROLLOUT_WRITES,
    observer_work,
    rollout_work,
    sampling_seed,
)
from asyncflow_core.flow.working.worker import read_rows
from asyncflow_core.parts import StageContract
from asyncflow_core.schema import CANONICAL
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.services.rollout import Completion, SamplingParams
from asyncflow_core.testing.aio import eventually

ROLLOUT = TaskSpec("rollout", ("prompt_ids",), ROLLOUT_WRITES)
SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.5, stop=("x",))

keys = st.builds(
    Key,
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**16 - 1),
)
seeds = st.integers(0, 2**63 - 1)


@pytest.mark.parametrize(
    ("seed", "key", "expected"),
    [
        (0, Key(0, 0, 0, 0), 5296655987384212389),
        (0, Key(0, 0, 0, 1), 6712002787492672257),
        (7, Key(1, 2, 3, 4), 8643180614332105081),
        (2**63 - 1, Key(65535, 2**32 - 1, 2**64 - 1, 65535), 6049254419547255983),
    ],
)
def test_sampling_seed_golden_values_never_change(seed, key, expected):
    assert sampling_seed(seed, key) == expected


@given(seeds, seeds, keys, keys)
def test_sampling_seed_any_inputs_is_63_bits_and_of_its_own(seed, other_seed, key, other_key):
    found = sampling_seed(seed, key)
    assert 0 <= found < 2**63
    if (seed, key) != (other_seed, other_key):
        assert found != sampling_seed(other_seed, other_key)


class Engine:
    """Answers every prompt with its own first token; refuses calls with a token of 5."""

    def __init__(self, fail_after=None):
        self.calls = []
        self.running = self.most_running = 0
        self.fail_after = fail_after
        self.closed = 0

    async def generate(self, requests):
        self.calls.append(requests)
        if any(5 in request.prompt_ids for request in requests):
            raise DataError("the prompt is too long")
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            for number, request in enumerate(requests):
                await asyncio.sleep(0)
                if number == self.fail_after:
                    raise EngineError("out of memory")
                one = np.ones(1, np.float32)
                yield Completion(
                    request.key, request.prompt_ids[:1], -one, np.array([[3, 1]], np.int32), "stop"
                )
        finally:
            self.running -= 1
            self.closed += 1


async def leased(store, put, task, groups, **more):
    await store.register(task)
    await put(groups, **more)
    lease = await store.lease(task.name, requester="t")
    return lease, await read_rows(store, lease, task.reads)


async def parts_of(work, lease, batch):
    return [part async for part in work(lease, batch)]


async def test_rollout_work_commits_canonical_columns_of_every_row(store, put):
    lease, batch = await leased(store, put, ROLLOUT, 4, samples=2)
    engine = Engine()
    parts = await parts_of(rollout_work(engine, SAMPLING, 9), lease, batch)
    rows = [info for part in parts for info in part.rows]
    assert sorted(rows, key=lambda info: info.key) == list(lease.rows)
    for part in parts:
        assert set(part.writes) == set(ROLLOUT_WRITES)
        await store.commit(lease.ref(part.rows), writes=part.writes)
        for number, info in enumerate(part.rows):
            assert part.writes["response_ids"][number].tolist() == [info.key.sequence % 7]
            assert part.writes["sampling"][number]["temperature"] == 0.5
            assert part.writes["sampling"][number]["stop"] == ["x"]
    (requests,) = engine.calls
    assert [r.seed for r in requests] == [sampling_seed(9, info.key) for info in lease.rows]


async def test_rollout_work_commits_rows_of_one_newest_version_together(store, put):
    """A store that goes back to a version tells by it which rows are void."""
    ends = {0: [[3, 1]], 1: [[2, 1]], 2: [[2, 1]], 3: [[1, 1], [3, 1]], 4: []}

    class Switched:
        async def generate(self, requests):
            for request, runs in zip(requests, ends.values(), strict=True):
                count = sum(n for _, n in runs)
                yield Completion(
                    request.key,
                    np.ones(count, np.int32),
                    -np.ones(count, np.float32),
                    np.array(runs, np.int32).reshape(-1, 2),
                    "stop",
                )

    await store.register(ROLLOUT)
    await put(5)
    lease = await store.lease("rollout", requester="r")
    found = {}
    async with contextlib.aclosing(
        rollout_work(Switched(), SAMPLING, 0)(lease, await read_rows(store, lease, ROLLOUT.reads))
    ) as parts:
        async for part in parts:
            assert part.writes.rows == len(part.rows)
            for info in part.rows:
                found[info.key.sequence] = part.version
    assert found == {0: 3, 1: 2, 2: 2, 3: 3, 4: None}


async def test_rollout_work_refusing_engine_drops_only_the_refused_prompts(store, put):
    lease, batch = await leased(store, put, ROLLOUT, 14)  # prompts 5 and 12 are refused
    engine = Engine()
    parts = await parts_of(rollout_work(engine, SAMPLING, 0), lease, batch)
    dropped = [part for part in parts if part.drop]
    assert sorted(info.key.sequence for part in dropped for info in part.rows) == [5, 12]
    assert {part.drop for part in dropped} == {"refused by the engine: the prompt is too long"}
    kept = [info.key.sequence for part in parts if not part.drop for info in part.rows]
    assert sorted(kept) == [n for n in range(14) if n not in (5, 12)]
    assert engine.most_running > 1  # the others are generated side by side


async def test_rollout_work_only_prompt_refused_is_dropped(store, put):
    lease, batch = await leased(store, put, ROLLOUT, 1, first=5)
    (part,) = await parts_of(rollout_work(Engine(), SAMPLING, 0), lease, batch)
    assert part.drop
    assert list(part.rows) == list(lease.rows)


async def test_rollout_work_engine_failure_after_some_rows_keeps_those(store, put):
    lease, batch = await leased(store, put, ROLLOUT, 4)
    parts = []
    with pytest.raises(EngineError, match="out of memory"):  # noqa: PT012
        async for part in rollout_work(Engine(fail_after=2), SAMPLING, 0)(lease, batch):
            parts.append(part)  # noqa: PERF401 - kept when the work fails
    assert sum(len(part.rows) for part in parts) == 2


class Wrong(Engine):
    """An engine whose answers went through `change`, a function of all its completions."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    async def generate(self, requests):
        right = [completion async for completion in super().generate(requests)]
        for completion in self.change(right):
            if isinstance(completion, Exception):
                raise completion
            yield completion


def with_first(**fields):
    return lambda found: [dataclasses.replace(found[0], **fields), *found[1:]]


FIVE = np.arange(5, dtype=np.int32)


@pytest.mark.parametrize(
    ("change", "error", "expected"),
    [
        (lambda found: found[1:], InvariantError, "left 1 of 4 requests without a completion"),
        (lambda found: [], InvariantError, "the first is 0/0/0/0"),
        (lambda found: [*found, found[0]], InvariantError, "completed row 0/0/0/0, which is not"),
        (with_first(key=Key(9, 9, 9, 9)), InvariantError, "completed row 9/9/9/9, which is not"),
        (with_first(key="a"), InvariantError, "completed row a, which is not"),
        (lambda found: [None, *found], InvariantError, "yielded a NoneType, not a Completion"),
        (
            lambda found: [*found[:2], DataError("too long")],
            InvariantError,
            "refused a request when it had answered others: too long",
        ),
        (with_first(response_ids=FIVE), DataError, "row 0/0/0/0 has 5 tokens, allowed: at most"),
        (with_first(response_ids=[0.5]), DataError, "row 0/0/0/0 is malformed: 0.5 is not a whole"),
        (with_first(response_ids=[2**40]), DataError, f"{2**40} is not a whole number that int32"),
        (with_first(response_ids=np.array(["a"])), DataError, "row 0/0/0/0 is malformed"),
        (with_first(response_ids=None), DataError, "row 0/0/0/0 is malformed"),
        (with_first(versions=None), DataError, "row 0/0/0/0 is malformed"),
        (with_first(behaviour_logprobs=[0.5]), DataError, "row 0/0/0/0 has a log-prob of 0.5"),
    ],
)
async def test_rollout_work_engine_that_breaks_its_contract_is_told_how(
    store, put, change, error, expected
):
    lease, batch = await leased(store, put, ROLLOUT, 4)
    with pytest.raises(error) as found:
        await asyncio.wait_for(parts_of(rollout_work(Wrong(change), SAMPLING, 0), lease, batch), 10)
    assert expected in str(found.value)


async def test_rollout_work_abandoned_closes_the_engines_call(store, put):
    lease, batch = await leased(store, put, ROLLOUT, 4)
    engine = Engine()
    work = rollout_work(engine, SAMPLING, 0)(lease, batch)
    await anext(work)
    await work.aclose()
    await eventually(lambda: engine.closed == 1)


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as made:
        yield made


async def run_stage(store, put, executor, stage, writes=("score",)):
    task = TaskSpec("s", ("prompt_ids",), writes)
    lease, batch = await leased(store, put, task, 3)
    work = stage_work(stage, StageContract(task.reads, writes), "judge-0", executor)
    (part,) = await parts_of(work, lease, batch)
    return part


async def test_stage_work_returns_one_part_of_all_rows(store, put, executor):
    part = await run_stage(store, put, executor, lambda batch: {"score": np.arange(batch.rows)})
    assert list(part.writes["score"]) == [0, 1, 2]
    assert len(part.rows) == 3


@pytest.mark.parametrize(
    "error",
    [ValueError("bad"), KeyError("nothing"), StopIteration(), SystemExit(3), KeyboardInterrupt()],
)
async def test_stage_work_stage_that_raises_is_named(store, put, executor, error):
    def stage(batch):
        raise error

    with pytest.raises(ServiceError, match="stage 'judge-0' failed: ") as found:
        await asyncio.wait_for(run_stage(store, put, executor, stage), 10)
    assert type(error).__name__ in str(found.value)
    assert found.value.service == "judge-0"
    assert found.value.__cause__ is error


async def test_stage_work_own_errors_pass_as_they_are(store, put, executor):
    def stage(batch):
        raise ConfigError("the judge has no model")

    with pytest.raises(ConfigError, match="no model"):
        await run_stage(store, put, executor, stage)


async def test_observer_work_sees_rows_and_acknowledges_them(store, put):
    lease, batch = await leased(store, put, TaskSpec("o", ("prompt_ids",)), 3)
    seen = []

    async def observe(*arguments):
        seen.append(arguments)

    (part,) = await parts_of(observer_work(observe), lease, batch)
    assert seen == [(lease.rows, batch)]
    assert part.writes is None
    assert not part.drop


@pytest.mark.parametrize(
    ("returned", "writes", "expected"),
    [
        (None, ("a",), "must return the columns ['a'], got NoneType"),
        ([1, 2], ("a",), "must return the columns ['a'], got list"),
        ({}, ("a",), "must return the columns ['a'], got []"),
        ({"a": [1, 2], "b": [1, 2]}, ("a",), "must return the columns ['a'], got ['a', 'b']"),
        ({"a": [1, 2, 3]}, ("a",), "returned 3 rows in column 'a' for 2 rows"),
        ({"a": 3}, ("a",), "column 'a': 'int' object is not iterable"),
        ({"reward": ["x", "y"]}, ("reward",), "column 'reward': could not convert string"),
        ({"loss_mask": [[0.5], [1]]}, ("loss_mask",), "0.5 is not a whole number that uint8 holds"),
        ({"loss_mask": [[-1], [1]]}, ("loss_mask",), "-1 is not a whole number that uint8 holds"),
        ({"reward": 1.0}, ("reward",), "column 'reward': a dense column is an array with a row"),
        ({"advantages": [1.0, 2.0]}, ("advantages",), "column 'advantages': "),
        ({"advantages": None}, ("advantages",), "column 'advantages': "),
        ({"advantages": [[1.0], ["x"]]}, ("advantages",), "column 'advantages': could not convert"),
        ({"advantages": [[1.0]]}, ("advantages",), "returned 1 rows in column 'advantages'"),
    ],
)
def test_to_columns_faults_name_stage_and_column(returned, writes, expected):
    with pytest.raises(DataError) as found:
        to_columns(returned, writes, 2, "judge-0")
    assert str(found.value).startswith("stage 'judge-0'")
    assert expected in str(found.value)


def test_to_columns_brings_values_to_the_schema():
    found = to_columns(
        {
            "reward": [1, 2],
            "advantages": [[1, 2, 3], []],
            "loss_mask": ([True], [False, True]),
            "mine": np.ones((2, 3), np.int16),
            "text": np.array(["a", None], object),
            "other": ["x", {"y": 1}],
            "ready": Column.dense([5, 6]),
        },
        ("reward", "advantages", "loss_mask", "mine", "text", "other", "ready"),
        2,
        "s",
    )
    assert isinstance(found, Batch)
    for name in ("reward", "advantages", "loss_mask"):
        assert found[name].kind == CANONICAL[name].kind
        assert found[name].array.dtype == CANONICAL[name].dtype
    assert found["mine"].array.dtype == np.int16
    assert found["text"].kind == found["other"].kind == "object"
    assert list(found["advantages"].lengths) == [3, 0]
