"""A store, a good client and a bad one that makes calls of any form; for tests and fuzzing.

A call is a method and its arguments as plain JSON; `{"int64": [[...]]}` and `{"int32": [...]}` are
the bytes of arrays, `{"hex": "..."}` is bytes, `{"number": "nan"}` is what JSON has not. In place
of any value `"$extent"` is memory that was lent to the bad client, as [shard, slot, start], and
`"$lease"` and `"$rows"` are a lease it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow_core.batch import GroupKey
from asyncflow_core.errors import AsyncFlowError, EngineError, InvariantError, LeaseLostError
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.data_store import prompts, rewards
from asyncflow_core.wire import Client
from asyncflow_store_zmq.layout import ColumnLayout, Layout
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.payload import FACTS
from asyncflow_store_zmq.store import ZmqDataStore
from asyncflow_store_zmq.unwritten import UNWRITTEN

CORPUS = Path(__file__).parent / "corpus"
LAYOUT = Layout((ColumnLayout("prompt_ids", "ragged", "<i4", ()),)).dump().hex()
GOOD = TaskSpec("good", ("prompt_ids",), ("reward",))
BAD = TaskSpec("bad", ("prompt_ids",))

Call = tuple[str, Any]

# A good example of each call; a fuzzer puts other values in its places.
EXAMPLES: dict[str, list[Any]] = {
    "store.hello": [],
    "store.register": ["extra", ["prompt_ids"], ["values"], False, ["train"], "any", 0],
    "store.end": ["0123"],
    "store.put": [
        ["$shard", "$slot", "$start", 64, 1, {"hex": LAYOUT}], {"int64": [[7, 0, 1]]},
        {"int32": [3]}, {"int32": [-1]}, 1, None, "train", 0, 0.0, [[], 0],
    ],
    "store.lend": [1000, []],
    "store.lease": ["bad", "bad", None, 1, None, "fifo", 60.0, 0.0],
    "store.find": ["$lease", "$lease", "$rows", ["prompt_ids"], []],
    "store.missing": ["$lease", "$lease", "$rows"],
    "store.commit": ["$lease", "$lease", "$rows", None, None, None, None, [[], 0]],
    "store.turn": [[], ["bad", "bad", None, 1, None, "fifo", 60.0, 0.0]],
    "store.renew": [[1], 60.0],
    "store.release": ["$lease", "$lease", "$rows"],
    "store.evict": ["bad"],
    "store.drop": [{"int64": [[9, 9, 9, 9]]}, "no reason"],
    "store.stats": [0, 0.0],
    "store.layout": [0],
    "store.memory": [],
    "store.checkpoint": [0],
    "store.restore": [0],
    "store.hurry": ["bad", "bad"],
    "store.notify": [1, None],
    "store.weights": [0, 0.0],
}  # fmt: skip


class Hostile:
    """One bad client among good ones; `check` says whether they are well."""

    def __init__(self, options: dict[str, Any]) -> None:
        """The options with which clients connect."""
        self._good = ZmqDataStore(ZmqOptions(**options), name="good")
        self._bad = Client(options["connect"], name="bad", token=options["token"], timeout_s=20)
        self._names: dict[str, Any] = {}
        self._round = 0

    async def __aenter__(self) -> Hostile:
        await self._good.open()
        await self._good.register(GOOD)
        await self._good.register(BAD)
        await self._good.put(prompts(2), keys=[GroupKey(5, 0, 0), GroupKey(5, 0, 1)])
        await self._bad.open()
        lent = await self._bad.call("store.lend", {"m": [1000, []]})
        found = await self._bad.call("store.lease", {"m": EXAMPLES["store.lease"]})
        self._names = {
            "$shard": lent[0],
            "$slot": lent[1],
            "$start": lent[1] << 20,
            "$lease": found[0],
            "$rows": found[1][: len(found[1]) // (FACTS + len(found[2]))],
        }
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._bad.aclose()
        await self._good.aclose()

    async def say(self, calls: Sequence[Call]) -> list[AsyncFlowError | None]:
        """Make calls; any refusal is fine, a failure inside the store is not."""
        answers: list[AsyncFlowError | None] = []
        for method, arguments in calls:
            error = None
            # Values no message can hold never leave this process.
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                value = self._value(arguments)
                try:
                    await self._bad.call(method, {"m": value}, timeout_s=1.0)
                except AsyncFlowError as refusal:
                    error = refusal
            assert not isinstance(error, EngineError | InvariantError), (method, arguments, error)
            answers.append(error)
        return answers

    def _value(self, value: Any) -> Any:
        match value:
            case str() if value in self._names:
                return self._names[value]
            case list():
                return [self._value(entry) for entry in value]
            case {"int64": numbers}:
                return np.array(numbers, np.int64).tobytes()
            case {"int32": numbers}:
                return np.array(numbers, np.int32).tobytes()
            case {"float64": numbers}:
                return np.array(numbers, np.float64)
            case {"hex": digits}:
                return bytes.fromhex(digits)
            case {"number": text}:
                return float(text)
        return value

    async def check(self) -> None:
        """The good client's rows go through the store as ever."""
        self._round += 1
        keys = [GroupKey(1, self._round, number) for number in range(3)]
        done = await self._good.put(prompts(3), keys=keys, samples=2, wait_s=5.0)
        assert (done.stored, done.known) == (3, 0)
        left = {key for group in keys for key in [(*group, 0), (*group, 1)]}
        while left:
            lease = await self._good.lease("good", requester="good", limit_rows=64, wait_s=5.0)
            assert lease is not None, left
            try:
                batch = await self._good.read(lease.ref(), ["prompt_ids"])
            except LeaseLostError:
                # Among them was a row whose owner promised bytes and never wrote them.
                assert [info for info in lease.rows if tuple(info.key) not in left]
                await self._good.release(lease.ref())
                assert UNWRITTEN in (await self._good.stats()).rows_dropped
                continue
            for info, ids in zip(lease.rows, batch["prompt_ids"], strict=True):
                if tuple(info.key) in left:
                    assert ids.tolist() == prompts(3)["prompt_ids"][info.key.sequence].tolist()
            result = await self._good.commit(lease.ref(), writes=rewards(len(lease.rows)))
            assert result.committed == len(lease.rows)
            left -= {tuple(info.key) for info in lease.rows}
        await asyncio.wait_for(self._good.stats(), 5.0)
