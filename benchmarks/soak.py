"""A store under full load for long: two tasks, memory that stays flat, no error.

Run: `make soak`, or `python benchmarks/soak.py --seconds 600`. Two producers, each faster than what
follows, put as fast as credit allows; a reward worker and a trainer stream. Every tenth of the time
a line tells rows, rate and memory; the end fails if memory grew after the first fifth.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time

import numpy as np
from store_memory import MB, weight
from store_rows import Rows

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_store_zmq.blocking import BlockingStore
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

BATCH = 16
REWARD = TaskSpec("reward", ("response_ids",), ("reward",))
TRAIN = TaskSpec("train", ("prompt", "response_ids", "reward"))
GROWTH = 1.2
"""Largest ratio of the last to the first memory figure."""


def produce(options: dict[str, str], source: int, stop: threading.Event) -> None:
    with BlockingStore(options["connect"], token=options["token"]) as store:
        writer = store.writer()
        data = []
        for seed in range(8):
            rows = Rows(BATCH, seed)
            columns = {
                "prompt": Column.dense(rows.prompts),
                "response_ids": Column.ragged(rows.responses),
            }
            data.append(Batch(columns))
        number = 0
        while not stop.is_set():
            keys = [GroupKey(source, 0, number * BATCH + i) for i in range(BATCH)]
            writer.put(data[number % 8], keys=keys)
            number += 1
        writer.flush()


def consume(
    options: dict[str, str], task: TaskSpec, stop: threading.Event, done: dict[str, int]
) -> None:
    with BlockingStore(options["connect"], token=options["token"]) as store:
        reader = store.reader(
            task.name, task.reads, requester=task.name, limit_rows=BATCH, wait_s=1.0
        )
        while not stop.is_set() or done["stopped"] < 2:
            for item in reader:
                writes = None
                if task.writes:
                    sums = [float(ids.sum() % 7) for ids in item.batch["response_ids"]]
                    writes = Batch({"reward": Column.dense(sums, np.float32)})
                reader.commit(item, writes)
                done[task.name] += len(item.rows)
            reader = store.reader(
                task.name, task.reads, requester=task.name, limit_rows=BATCH, wait_s=1.0
            )


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    seconds = parser.parse_args().seconds
    stop, done = threading.Event(), {"reward": 0, "train": 0, "stopped": 0}
    async with ZmqDataStore(ZmqOptions(capacity_rows=4096)) as store:
        for task in (REWARD, TRAIN):
            await store.register(task)
        options = store.attach_options()
        producing = [
            asyncio.create_task(asyncio.to_thread(produce, options, source, stop))
            for source in (0, 1)
        ]
        consuming = [
            asyncio.create_task(asyncio.to_thread(consume, options, task, stop, done))
            for task in (REWARD, TRAIN)
        ]
        start, figures, before = time.monotonic(), [], 0
        for _ in range(10):
            await asyncio.sleep(seconds / 10)
            for task in (*producing, *consuming):
                if task.done():
                    await task  # raises what it raised
            figures.append(weight(store) / MB)
            rate = (done["train"] - before) / (seconds / 10)
            before = done["train"]
            elapsed = time.monotonic() - start
            print(
                f"{elapsed:6.0f} s  {before:,} rows trained  {rate:,.0f} rows/s  "
                f"memory {figures[-1]:.0f} MB",
                flush=True,
            )
        stop.set()
        await asyncio.gather(*producing)
        done["stopped"] = 2
        await asyncio.gather(*consuming)
        stats = await store.stats()
    print(f"left: {stats.rows} rows; memory {figures[1]:.0f} MB, then {figures[-1]:.0f} MB")
    flat = figures[-1] <= GROWTH * figures[1]
    if not flat:
        print("memory grew", file=sys.stderr)
    return 0 if flat and stats.rows == 0 else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
