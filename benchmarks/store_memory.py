"""What the store weighs, and what a lease costs as it fills."""

from __future__ import annotations

import re
import statistics
import time
from pathlib import Path

import numpy as np
from asyncflow_store_zmq.blocking import BlockingStore
from asyncflow_store_zmq.store import ZmqDataStore
from store_rows import Rows

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.services.data_store import TaskSpec

MB = 1e6
SAMPLES = 8
ROWS = 1_000_000


def pss(pid: int, field: str = "Pss") -> int:
    """Proportional set size of a process, bytes."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def weight(store: ZmqDataStore) -> int:
    """Controller and shards: their PSS, with the arenas counted in full wherever they are mapped."""
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


def growth(store: ZmqDataStore) -> dict[str, float]:
    """A lease of 64 rows through the socket at 1,000 and at 1M rows; the controller's bytes a row."""
    options = store.attach_options()
    controller = store.processes.pids[-1]
    with BlockingStore(options["connect"], token=options["token"]) as client:
        client.register(TaskSpec("rollout", ("prompt_ids",), ("response_ids", "reward", "score")))
        client.register(TaskSpec("train", ("prompt_ids", "response_ids", "reward", "score")))
        put = 0

        def fill(rows: int) -> None:
            nonlocal put
            while put < rows // SAMPLES:
                count = min(125, rows // SAMPLES - put)
                prompts = Column.ragged([np.arange(4, dtype=np.int32)] * count)
                keys = [GroupKey(0, 0, put + i) for i in range(count)]
                client.put(Batch({"prompt_ids": prompts}), keys=keys, samples=SAMPLES)
                put += count

        fill(1000)
        small = lease_p50(client)
        before = pss(controller)
        fill(ROWS)
        rows_put = (pss(controller) - before) / ROWS
        large = lease_p50(client)
        produce(client, ROWS)
        produced = (pss(controller) - before) / ROWS
    print(f"lease of 64, p50: {small * 1e6:.0f} us at 1,000 rows, {large * 1e6:.0f} us at 1M rows")
    print(f"controller, bytes a row: {rows_put:.1f} put, {produced:.1f} with all columns there")
    return {"lease_growth": large / small, "ledger_bytes_per_row": max(rows_put, produced)}


def lease_p50(client: BlockingStore, repeats: int = 1000) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        lease = client.lease("rollout", requester="bench", limit_rows=64)
        times.append(time.perf_counter() - start)
        client.release(lease.ref())
    return statistics.median(times)


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
