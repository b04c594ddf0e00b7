"""One row's way through client, controller and reader, with warm and with cold caches.

All three run here in one process and one after another, so that each is timed alone: no process is
woken, and nobody is waited for. Before each timed stage of the cold turn, more memory than the
caches hold is read, as a training step or another machine's guest does between two rows.

    put     from `Writer.put` to the message being on its way
    decide  the controller: read it, store the row, hand it out to who waits, answer both
    read    from the message being there to the columns being in the caller's hands
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from store import COLUMNS, as_batch
from store_rows import Rows

from asyncflow_core.batch import GroupKey
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_store_zmq.blocking import BlockingStore
from asyncflow_store_zmq.controller import Controller
from asyncflow_store_zmq.shard import Shard
from asyncflow_store_zmq.spec import StoreSpec

TURNS, ROWS = 5, 100
READS = COLUMNS[:3]
STAGES = ("put", "decide", "read")
CACHE = np.ones(64 << 20, np.uint8).view(np.int64)
now = time.perf_counter


def timed(stage: Callable[[], Any], *, cold: bool) -> tuple[float, Any]:
    if cold:
        CACHE.sum()
    start = now()
    result = stage()
    return now() - start, result


class Way:
    """A store whose controller does a client's call when it is told to."""

    def __init__(self, controller: Controller, spec: StoreSpec) -> None:
        self.controller = controller
        self.producer, self.consumer = (
            BlockingStore(spec.address, token=spec.token, name=name) for name in ("put", "read")
        )
        self.data = [as_batch(Rows(1, seed)).select(READS) for seed in range(16)]
        self.sequence = 0

    async def open(self) -> None:
        lane = self.controller._lane
        await asyncio.to_thread(self.producer.open)
        (self.puts,) = lane._connections
        await asyncio.to_thread(self.consumer.open)
        (self.reads,) = lane._connections - {self.puts}
        await asyncio.to_thread(self.consumer.register, TaskSpec("train", READS))
        self.writer = self.producer.writer()
        self.reader = self.consumer.reader("train", READS, requester="bench", limit_rows=1)
        await asyncio.to_thread(self.put)
        self.item = await asyncio.to_thread(next, self.reader)

    def put(self) -> None:
        key = GroupKey(0, 0, self.sequence)
        self.writer.put(self.data[self.sequence % 16], keys=[key])
        self.sequence += 1

    def row(self, *, cold: bool) -> list[float]:
        """Seconds of each stage."""
        self.reader.commit(self.item)
        self.reads._readable()  # and from here on the reader waits
        put, _ = timed(self.put, cold=cold)
        decide, _ = timed(self.puts._readable, cold=cold)
        read, self.item = timed(lambda: next(self.reader), cold=cold)
        return [put, decide, read]


async def measure(directory: Path) -> dict[str, list[float]]:
    """Microseconds of each stage and of all, a median a turn; warm and cold turns alternate."""
    where = str(directory)
    spec = StoreSpec(
        where, where, f"ipc://{where}/store.sock", secrets.token_hex(8), 1, "none", 1 << 20,
        1 << 32, 0, 10.0,
    )  # fmt: skip
    found: dict[str, list[float]] = {}
    shard = spec.server(spec.shard_address(0), name="shard-0")
    Shard(spec, 0).expose(shard)
    async with shard:
        controller = Controller(dataclasses.replace(spec, shard_addresses=(shard.address,)))
        await controller.open()
        way = Way(controller, spec)
        await way.open()
        for turn in range(2 * (TURNS + 1)):
            cold = bool(turn % 2)
            medians = [
                1e6 * statistics.median(stage)
                for stage in zip(*(way.row(cold=cold) for _ in range(ROWS)), strict=True)
            ]
            if turn > 1:  # the first two warm up
                for stage, value in zip((*STAGES, "all"), (*medians, sum(medians)), strict=True):
                    found.setdefault(f"{'cold' if cold else 'warm'}_{stage}_us", []).append(value)
        way.producer.close()
        way.consumer.close()
        await controller.aclose()
    return found


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        found = asyncio.run(measure(Path(directory)))
    print(f"{'stage':8} {'warm, us':>24} {'cold, us':>24}")
    for stage in (*STAGES, "all"):
        cells = []
        for state in ("warm", "cold"):
            runs = found[f"{state}_{stage}_us"]
            cells.append(f"{statistics.median(runs):7.0f}  ({min(runs):.0f} - {max(runs):.0f})")
        print(f"{stage:8} {cells[0]:>24} {cells[1]:>24}")
    print(json.dumps({name: round(statistics.median(runs), 1) for name, runs in found.items()}))


if __name__ == "__main__":
    main()
