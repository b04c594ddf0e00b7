"""Cost of the wire between two processes over ipc: small calls, and batches both ways.

Run: python benchmarks/wire_rpc.py
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from asyncflow_core.batch import Batch, Column, Key
from asyncflow_core.services.data_store import Lease, RowInfo
from asyncflow_core.wire import Client, Server, remote, serve_object

ROWS, PROMPT, RESPONSE = 256, 256, 1000


class Bench:
    """What is served."""

    def __init__(self) -> None:
        self._batch: Batch | None = None

    async def ping(self, number: int) -> int:
        return number

    async def put(self, batch: Batch) -> int:
        self._batch = batch
        return batch.rows

    async def get(self) -> Batch:
        assert self._batch is not None
        return self._batch

    async def lease(self) -> Lease:
        rows = tuple(RowInfo(i, Key(0, 0, i, 0), 3, 1256, 2) for i in range(ROWS))
        return Lease(1, "train", "trainer-0", 7, 60.0, rows)

    async def cpu_s(self) -> float:
        return _cpu_s()


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _batch() -> Batch:
    rng = np.random.default_rng(0)
    lengths = rng.integers(500, 1500, ROWS)
    return Batch(
        {
            "prompt_ids": Column.ragged([np.arange(PROMPT, dtype=np.int32)] * ROWS),
            "response_ids": Column.ragged([np.zeros(n, np.int32) for n in lengths]),
            "behaviour_logprobs": Column.ragged([np.zeros(n, np.float32) for n in lengths]),
            "loss_mask": Column.ragged([np.ones(n, np.uint8) for n in lengths]),
            "finish_reason": Column.objects(["stop"] * ROWS),
        }
    )


async def _serve(address: str) -> None:
    server = Server(address, name="bench", token="bench")
    serve_object(server, "bench", Bench())
    async with server:
        await asyncio.Event().wait()


async def _measure(address: str) -> None:
    async with Client(address, name="client", token="bench") as client:
        bench = remote(Bench, client, "bench")

        async def timed(
            name: str, call: Callable[[], Awaitable[Any]], count: int, nbytes: int = 0
        ) -> None:
            took = []
            await call()
            here, there = _cpu_s(), await bench.cpu_s()
            for _ in range(count):
                begin = time.perf_counter()
                await call()
                took.append(time.perf_counter() - begin)
            here, there = (_cpu_s() - here) / count, (await bench.cpu_s() - there) / count
            p50, p99 = np.percentile(took, [50, 99])
            rate = f", {nbytes / p50 / 1e9:.2f} GB/s" if nbytes else ""
            print(
                f"{name:28} p50 {p50 * 1e6:7.0f} us  p99 {p99 * 1e6:7.0f} us  cpu per call: "
                f"client {here * 1e6:.0f} us, server {there * 1e6:.0f} us{rate}"
            )

        batch = _batch()
        await timed("ping", lambda: bench.ping(1), 5000)
        await timed("lease of 256 rows", bench.lease, 300)
        await timed(
            f"put batch {batch.nbytes >> 10} KiB", lambda: bench.put(batch), 300, batch.nbytes
        )
        await timed("get batch", bench.get, 300, batch.nbytes)
        begin = time.perf_counter()
        await asyncio.gather(*[bench.ping(i) for i in range(1000)])
        print(f"1000 pings at once: {(time.perf_counter() - begin) * 1e3:.0f} ms")
        here, there, begin = _cpu_s(), await bench.cpu_s(), time.perf_counter()
        for i in range(2000):
            await bench.ping(i)
            await asyncio.sleep(max(0.0, begin + i / 1000 - time.perf_counter()))
        took = time.perf_counter() - begin
        print(
            f"{2000 / took:.0f} calls/s for {took:.1f} s: client {(_cpu_s() - here) / took:.1%}, "
            f"server {(await bench.cpu_s() - there) / took:.1%} of a core"
        )


def main() -> None:
    """Serve in a child, measure here."""
    with tempfile.TemporaryDirectory() as directory:
        address = f"ipc://{directory}/s"
        child = subprocess.Popen([sys.executable, __file__, address])
        try:
            asyncio.run(_measure(address))
        finally:
            child.kill()
            child.wait()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(_serve(sys.argv[1]))
    else:
        main()
