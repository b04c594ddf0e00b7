"""What a row costs the ledger: time by batch, memory at 1M rows, a lease as the table grows.

Run: `python benchmarks/ledger.py [rows]`. By batch: groups of one row, one task, no other work.
Else groups of 8 rows put one by one (the worst case: nothing is shared between groups) or 32
together, 2 tasks, 4 columns. "rows put": nothing done yet; "rows produced": every row also has its
response, tokens and versions, and waits for the second task. Memory is what tracemalloc sees.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
import tracemalloc

from asyncflow_core.batch import BatchRef, GroupKey
from asyncflow_core.ledger import Admission, Ledger, positions_in, row_number
from asyncflow_core.services.data_store import TaskSpec

SAMPLES = 8
ROLLOUT = TaskSpec("rollout", ("prompt_ids",), ("response_ids", "reward"))
TRAIN = TaskSpec("train", ("prompt_ids", "response_ids", "reward"), ("advantages",))


def filled(rows: int, together: int = 1) -> Ledger:
    """A ledger with `rows` rows waiting for the first task, so many groups put at a time."""
    ledger = Ledger(capacity_rows=rows + SAMPLES * together, capacity_bytes=0)
    ledger.register(ROLLOUT)
    ledger.register(TRAIN)
    intake = ledger.intake(Admission(("prompt_ids",), samples=SAMPLES))
    for sequence in range(0, rows // SAMPLES, together):
        intake.put(GroupKey(0, 0, sequence), [100] * together, [-1] * together)
    ledger.take_effects()
    return ledger


def by_batch(batch: int, rows: int = 20_480) -> list[float]:
    """Seconds a row of put, lease and commit, the least of five runs."""
    found = []
    for _ in range(5):
        ledger = Ledger(capacity_rows=rows, capacity_bytes=0)
        ledger.register(TaskSpec("train", ("prompt_ids",)))
        admission, tokens, oldest = Admission(("prompt_ids",)), [100] * batch, [-1] * batch
        marks = [time.perf_counter()]
        for first in range(0, rows, batch):
            ledger.intake(admission).put(GroupKey(0, 0, first), tokens, oldest)
        marks.append(time.perf_counter())
        grants = [
            ledger.grant(0.0, "train", requester="r", limit_rows=batch)
            for _ in range(0, rows, batch)
        ]
        marks.append(time.perf_counter())
        refs = []
        for grant in grants:
            assert grant is not None
            numbers = (row_number(b.number, row) for b, m in grant.picks for row in positions_in(m))
            refs.append(BatchRef(grant.lease_id, grant.lease_id, tuple(numbers)))
        begin = time.perf_counter()
        for ref in refs:
            ledger.commit(0.0, ref)
        marks[2:] = [marks[2], marks[2] + time.perf_counter() - begin]
        found.append([(end - start) / rows for start, end in itertools.pairwise(marks)])
    return [min(times) for times in zip(*found, strict=True)]


def produce(ledger: Ledger, rows: int) -> None:
    """Commit `rows` rows of the first task."""
    for _ in range(rows // 64):
        lease = ledger.lease(0.0, "rollout", requester="r", limit_rows=64)
        assert lease is not None
        numbers = lease.ref().rows
        count = len(numbers)
        ledger.commit(0.0, lease.ref(), tokens=[900] * count, oldest=[700] * count)


def lease_p50(ledger: Ledger, repeats: int = 2001) -> float:
    """Median seconds of leasing 64 rows (and giving them back, untimed)."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        lease = ledger.lease(0.0, "rollout", requester="r", limit_rows=64)
        times.append(time.perf_counter() - start)
        assert lease is not None
        ledger.release(0.0, lease.ref())
    return statistics.median(times)


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    for batch in (1, 16, 256):
        put, lease, commit = (1e6 * seconds for seconds in by_batch(batch))
        print(f"batch {batch}: put {put:.2f}, lease {lease:.2f}, commit {commit:.2f} us a row")
    small, large = filled(1000), filled(rows)
    base, grown = lease_p50(small), lease_p50(large)
    print(f"lease of 64, p50: {base * 1e6:.1f} us at 1000 rows, {grown * 1e6:.1f} us at {rows}")
    print(f"growth: {grown / base:.2f}x")
    del small, large
    tracemalloc.start()
    for together in (1, 32):
        gc.collect()
        base = tracemalloc.get_traced_memory()[0]
        ledger = filled(rows, together)
        print(f"groups put {together} at a time:")
        print(f"  rows put: {(tracemalloc.get_traced_memory()[0] - base) / rows:.1f} bytes a row")
        produce(ledger, rows)
        print(
            f"  rows produced: {(tracemalloc.get_traced_memory()[0] - base) / rows:.1f} bytes a row"
        )
        del ledger


if __name__ == "__main__":
    main()
