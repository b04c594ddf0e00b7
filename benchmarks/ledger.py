"""What a row costs the ledger: memory at 1M rows, and the time of a lease as the table grows.

Run: `python benchmarks/ledger.py [rows]`. Groups of 8 rows, 2 tasks, 4 columns. "rows put": nothing
done yet; "rows produced": every row also has its response, tokens and versions, and waits for the
second task. Memory is what tracemalloc sees.
"""

from __future__ import annotations

import statistics
import sys
import time
import tracemalloc

from asyncflow_core.batch import GroupKey
from asyncflow_core.ledger import Admission, Ledger
from asyncflow_core.services.data_store import TaskSpec

SAMPLES = 8
ROLLOUT = TaskSpec("rollout", ("prompt_ids",), ("response_ids", "reward"))
TRAIN = TaskSpec("train", ("prompt_ids", "response_ids", "reward"), ("advantages",))


def filled(rows: int) -> Ledger:
    """A ledger with `rows` rows waiting for the first task."""
    ledger = Ledger(capacity_rows=rows + SAMPLES, capacity_bytes=0)
    ledger.register(ROLLOUT)
    ledger.register(TRAIN)
    admission = Admission(("prompt_ids",), samples=SAMPLES)
    for sequence in range(rows // SAMPLES):
        ledger.put(GroupKey(0, 0, sequence), admission, tokens=100)
    ledger.take_effects()
    return ledger


def produce(ledger: Ledger, rows: int) -> None:
    """Commit `rows` rows of the first task."""
    for _ in range(rows // 64):
        lease = ledger.lease(0.0, "rollout", requester="r", limit_rows=64)
        assert lease is not None
        numbers = lease.ref().rows
        ledger.commit(
            0.0, lease.ref(), tokens=dict.fromkeys(numbers, 900), oldest=dict.fromkeys(numbers, 700)
        )


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
    small, large = filled(1000), filled(rows)
    base, grown = lease_p50(small), lease_p50(large)
    print(f"lease of 64, p50: {base * 1e6:.1f} us at 1000 rows, {grown * 1e6:.1f} us at {rows}")
    print(f"growth: {grown / base:.2f}x")
    del small, large
    tracemalloc.start()
    ledger = filled(rows)
    print(f"rows put: {tracemalloc.get_traced_memory()[0] / rows:.1f} bytes a row")
    produce(ledger, rows)
    print(f"rows produced: {tracemalloc.get_traced_memory()[0] / rows:.1f} bytes a row")


if __name__ == "__main__":
    main()
