"""What the store weighs, and what a lease costs as it fills."""

from __future__ import annotations

import re
import statistics
import time
from pathlib import Path

import numpy as np
from store_rows import Rows

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_store_zmq.blocking import BlockingStore
from asyncflow_store_zmq.store import ZmqDataStore

MB = 1e6
SAMPLES = 8
ROWS = 1_000_000


def pss(pid: int, field: str = "Pss") -> int:
    """Proportional set size of a process, bytes."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def weight(store: ZmqDataStore) -> int:
    """Controller and shards: their PSS, and the arenas in full, wherever they are mapped."""
    spec = store.processes.spec
    arenas = sum(spec.arena(n).stat().st_blocks * 512 for n in range(spec.shards))
    return arenas + sum(pss(p) - pss(p, "Pss_Shmem") for p in store.processes.pids)


def footprint(store: ZmqDataStore) -> dict[str, float]:
    """Idle, and with 4,096 rows put 16 at a time."""
    from store import COLUMNS, as_batch

    idle = sum(map(pss, store.processes.pids))
    options = store.attach_options()
    with BlockingStore(options["connect"], token=options["token"]) as client:
        client.register(TaskSpec("train", COLUMNS))
        data = [Rows(16, seed) for seed in range(8)]
        client.put(as_batch(data[0]), keys=[GroupKey(1, 0, i) for i in range(16)])
        before, payload = weight(store), 0
        for number in range(256):
            rows = data[number % 8]
            payload += rows.nbytes
            keys = [GroupKey(0, 0, 16 * number + i) for i in range(16)]
            client.put(as_batch(rows), keys=keys)
        grown = weight(store) - before
    print(f"idle: {idle / MB:.1f} MB of PSS in {len(store.processes.pids)} processes")
    print(f"4,096 rows: payload {payload / MB:.1f} MB, growth {grown / MB:.1f} MB")
    return {"memory_over_payload": grown / payload, "idle_rss_mb": idle / MB}


class Filled:
    """A store with rows that wait for their first task."""

    def __init__(self, store: ZmqDataStore) -> None:
        options = store.attach_options()
        self.client = BlockingStore(options["connect"], token=options["token"])
        self.client.open()
        writes = ("response_ids", "reward", "score")
        self.client.register(TaskSpec("rollout", ("prompt_ids",), writes))
        self.client.register(TaskSpec("train", ("prompt_ids", *writes)))
        self.times: list[float] = []
        self._groups = 0

    def fill(self, rows: int) -> None:
        while self._groups < rows // SAMPLES:
            count = min(125, rows // SAMPLES - self._groups)
            prompts = Column.ragged([np.arange(4, dtype=np.int32)] * count)
            keys = [GroupKey(0, 0, self._groups + i) for i in range(count)]
            self.client.put(Batch({"prompt_ids": prompts}), keys=keys, samples=SAMPLES)
            self._groups += count

    def lease(self, repeats: int) -> None:
        """Lease 64 rows, timed, and give them back."""
        for _ in range(repeats):
            start = time.perf_counter()
            lease = self.client.lease("rollout", requester="bench", limit_rows=64)
            self.times.append(time.perf_counter() - start)
            self.client.release(lease.ref())


def growth(few: ZmqDataStore, many: ZmqDataStore) -> dict[str, float]:
    """A lease of 64 through the socket at 1,000 and at 1M rows; the controller's bytes a row."""
    controller = many.processes.pids[-1]
    small, large = Filled(few), Filled(many)
    small.fill(1000)
    large.fill(1000)
    before = pss(controller)
    large.fill(ROWS)
    rows_put = (pss(controller) - before) / ROWS
    for _ in range(40):  # in turns, so that both see the same machine
        small.lease(25)
        large.lease(25)
    base, grown = statistics.median(small.times), statistics.median(large.times)
    produce(large.client, ROWS)
    produced = (pss(controller) - before) / ROWS
    small.client.close()
    large.client.close()
    print(f"lease of 64, p50: {base * 1e6:.0f} us at 1,000 rows, {grown * 1e6:.0f} us at 1M rows")
    print(f"controller, bytes a row: {rows_put:.1f} put, {produced:.1f} with all columns there")
    return {"lease_growth": grown / base, "ledger_bytes_per_row": max(rows_put, produced)}


def produce(client: BlockingStore, rows: int) -> None:
    done = 0
    while done < rows:
        lease = client.lease("rollout", requester="bench", limit_rows=512)
        count = len(lease.rows)
        ids = Column.ragged([np.arange(4, dtype=np.int32)] * count)
        ones = Column.dense(np.ones(count), np.float32)
        client.commit(
            lease.ref(), writes=Batch({"response_ids": ids, "reward": ones, "score": ones})
        )
        done += count
