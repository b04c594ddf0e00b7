"""What the controller's table takes for a put, a lease and a commit by batch: no sockets, no rows.

Run: `python benchmarks/store_table.py`. Groups of one row, one task that writes nothing. Shown is
the least of some runs, microseconds a call and a row.
"""

from __future__ import annotations

import gc
import itertools
import time
from array import array
from collections import Counter

import numpy as np
from store_rows import OPERATIONS

from asyncflow_core.batch import BatchRef
from asyncflow_core.ledger import Admission
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_store_zmq.layout import ColumnLayout, Layout
from asyncflow_store_zmq.payload import Written
from asyncflow_store_zmq.table import Table

COLUMNS = ("prompt", "response_ids", "behaviour_logprobs", "reward")
LAYOUT = Layout(tuple(ColumnLayout(name, "dense", "<f4", ()) for name in COLUMNS)).dump()
NAMES = ("put", "lease", "commit")
RUNS = 60


class Bench:
    """A table and the memory it lends."""

    def __init__(self) -> None:
        generations: Counter[tuple[int, int]] = Counter()

        def raise_generation(shard: int, slot: int) -> int:
            generations[shard, slot] += 1
            return generations[shard, slot]

        self.table = Table(
            capacity_rows=1 << 20,
            capacity_bytes=0,
            max_staleness=0,
            max_gap_s=5.0,
            raise_generation=raise_generation,
        )
        self.table.pool.add_shard()
        self.table.register(TaskSpec("train", COLUMNS))
        self.extent = self.table.pool.lend("bench", 1 << 22)
        self.next = 0

    def run(self, batch: int) -> list[float]:
        """Seconds a call of each."""
        calls, table = OPERATIONS[batch], self.table
        facts, written = (
            array("i", [1] * batch),
            Written(0, self.extent.slot, self.extent.start, 64, batch, LAYOUT),
        )
        puts = []
        for _ in range(calls):
            keys = np.zeros((batch, 3), np.int64)
            keys[:, 2] = np.arange(self.next, self.next + batch)
            self.next += batch
            puts.append(keys)
        marks = [time.perf_counter()]
        for keys in puts:
            put = table.begin_put("bench", written, keys, Admission(COLUMNS), facts, facts)
            table.advance_put(put)
            table.end_put(put, 0.0)
        marks.append(time.perf_counter())
        found = [table.lease(0.0, "train", "bench", limit_rows=batch) for _ in range(calls)]
        marks.append(time.perf_counter())
        for handout in found:
            ref = BatchRef(handout.lease_id, handout.lease_id, tuple(handout.rows[0].tolist()))
            table.commit(0.0, "bench", ref, None, (), (), None)
        marks.append(time.perf_counter())
        return [(end - start) / calls for start, end in itertools.pairwise(marks)]


def main() -> None:
    bench = Bench()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # as the controller's process
    for batch in OPERATIONS:
        runs = [bench.run(batch) for _ in range(RUNS)]
        least = [1e6 * min(seconds) for seconds in zip(*runs, strict=True)]
        calls = ", ".join(f"{n} {t:.1f}" for n, t in zip(NAMES, least, strict=True))
        rows = " / ".join(f"{t / batch:.2f}" for t in least)
        print(f"batch {batch}: {calls} us a call; {rows} us a row")


if __name__ == "__main__":
    main()
