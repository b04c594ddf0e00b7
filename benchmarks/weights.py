"""Weights from one trainer to replicas on this host: rates, pauses, bytes.

    make bench BENCH=weights

Prints tables and, last, a JSON line. Rates that are compared are measured in turn, round by round,
in one process: a ratio is the median of the rounds', a rate that of the best round, since other
work on the machine only takes time away.

- shm_over_memcpy: a replica's stage from shared memory (fetch and copy, warm pages), over memcpy of
  as many bytes; the smallest over the sizes.
- verify_gb_s: the checksum over what a replica holds.
- zmq_over_loopback: a replica's pull over tcp, over reading as many bytes from a plain socket, at
  the largest size of its table; for small ones the start of a pull, some ms, counts.
- trainer_bytes_over_model: bytes the trainer sent for 4 replicas over ZeroMQ, over the model's.
- pause_ms_by_gb: between two tokens of the transformers engine, while weights are exchanged.
- delta_bytes_share: of a step of the demo's model at the demo's learning rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from weights_engine import demo_delta_shares, pause_ms
from weights_replica import Replica, make_sync, replicas

from asyncflow_core.services.weight_sync import Bucket, PublishedWeights, TensorSpec, WeightSync

BUCKET = 64 << 20
ROUNDS = 7
"""At least; short ones are repeated more often."""
WARM = 3
"""Rounds that are not counted: memory is touched, and both sides hold two versions."""
TCP = {"listen": "tcp://127.0.0.1:*"}


NOISE = np.random.default_rng(0).integers(0, 256, BUCKET, np.uint8)


def sizes(max_gb: float) -> list[int]:
    """Bytes, whole buckets."""
    return [math.ceil(gb * 1e9 / BUCKET) * BUCKET for gb in (0.1, 0.5, 1.0, 2.0) if gb <= max_gb]


def rounds_for(nbytes: int) -> int:
    """Rounds that count."""
    return max(ROUNDS, round(2e9 / nbytes))


async def model(nbytes: int, version: int) -> AsyncIterator[Bucket]:
    """Tensors of 16 MiB in buckets of 64 MiB, through one buffer, as trainers export them."""
    buffer = NOISE
    buffer[8:16] = version
    for number in range(nbytes // BUCKET):
        buffer[:8] = np.frombuffer(np.int64(number).tobytes(), np.uint8)
        specs = tuple(
            TensorSpec(f"layers.{number}.{n}.weight", "BF16", (1024, 8192), n << 24)
            for n in range(4)
        )
        yield Bucket(specs, buffer)


async def publish(sync: WeightSync, version: int, nbytes: int) -> tuple[PublishedWeights, float]:
    """Publish and retire the version before; seconds it took."""
    if version:
        await sync.retire(version - 1)
    start = time.perf_counter()
    published = await sync.publish(version, 0, model(nbytes, version))
    return published, time.perf_counter() - start


async def shared_memory(nbytes: int, count: int, run_dir: Path) -> dict[str, Any]:
    """Rates of stage, memcpy and verify, with `count` replicas staging side by side."""
    rounds = []
    async with (
        make_sync("host", {"versions": 2}, run_dir) as sync,
        replicas(count, "host", {}, run_dir) as found,
    ):
        for replica in found:
            await replica.prepare(nbytes, count == 1)
        publish_s = []
        for version in range(WARM + rounds_for(nbytes)):
            published, took = await publish(sync, version, nbytes)
            copy_s = await found[0].memcpy_s() if count == 1 else 0.0
            took_in = await asyncio.gather(*[r.receive(published, True) for r in found])
            assert all(t.checksum == published.manifest.checksum for t in took_in)
            if version >= WARM:
                publish_s.append(took)
                rounds.append((copy_s, took_in[0].wall_s, took_in[0].verify_s))
    best = [min(column) for column in zip(*rounds, strict=True)]
    return {
        "gb": nbytes / 1e9,
        "replicas": count,
        "publish_gb_s": nbytes / min(publish_s) / 1e9,
        "memcpy_gb_s": nbytes / best[0] / 1e9 if count == 1 else 0,
        "stage_gb_s": nbytes / best[1] / 1e9,
        "verify_gb_s": nbytes / best[2] / 1e9,
        "over_memcpy": statistics.median(r[0] / r[1] for r in rounds),
    }


async def loopback(nbytes: int, run_dir: Path) -> dict[str, Any]:
    """One replica over ZeroMQ on tcp against a plain socket."""
    rounds = []
    data = np.full(nbytes, 7, np.uint8)
    async with (
        make_sync("zmq", TCP, run_dir) as sync,
        replicas(1, "zmq", TCP, run_dir) as (replica,),
    ):
        await replica.prepare(nbytes, False)
        for version in range(WARM + rounds_for(nbytes)):
            published, _ = await publish(sync, version, nbytes)
            raw_s = await _raw(replica, data)
            taken = await replica.receive(published, False)
            assert taken.checksum == published.manifest.checksum
            if version >= WARM:
                rounds.append((raw_s, taken.wall_s))
    raw_s, zmq_s = (min(column) for column in zip(*rounds, strict=True))
    return {
        "gb": nbytes / 1e9,
        "raw_gb_s": nbytes / raw_s / 1e9,
        "zmq_gb_s": nbytes / zmq_s / 1e9,
        "over_loopback": statistics.median(raw / zmq for raw, zmq in rounds),
    }


async def _raw(replica: Replica, data: Any) -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(data)

        thread = threading.Thread(target=send)
        thread.start()
        took = await replica.raw_s(server.getsockname()[1])
        thread.join()
        return took


async def fan_out(nbytes: int, count: int, run_dir: Path) -> dict[str, Any]:
    """Replicas that pull at once; what the trainer sent."""
    async with (
        make_sync("zmq", TCP, run_dir) as sync,
        replicas(count, "zmq", TCP, run_dir) as found,
    ):
        published, _ = await publish(sync, 0, nbytes)
        start = time.perf_counter()
        taken = await asyncio.gather(*[r.receive(published, False) for r in found])
        wall_s = time.perf_counter() - start
        assert all(t.checksum == published.manifest.checksum for t in taken)
        sent = (await sync.stats()).bytes_sent
        return {
            "gb": nbytes / 1e9,
            "replicas": count,
            "all_gb_s": count * nbytes / wall_s / 1e9,
            "sent_over_model": sent / nbytes,
        }


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A table."""
    print(f"\n{title}")
    print("  ".join(f"{name:>15}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:>15.3g}" for value in row.values()), flush=True)


async def measure(max_gb: float, run_dir: Path) -> dict[str, Any]:
    """Everything, largest things one after another."""
    every = sizes(max_gb)
    middle = min(every[-1], sizes(0.5)[-1])
    stages = [await shared_memory(nbytes, 1, run_dir) for nbytes in every]
    show("shared memory, one replica", stages)
    show(
        "shared memory, replicas side by side (small model)",
        [await shared_memory(every[0], count, run_dir) for count in (1, 2, 4)],
    )
    pulls = [await loopback(nbytes, run_dir) for nbytes in every if nbytes <= middle]
    show("ZeroMQ over tcp, one replica, and a plain socket", pulls)
    fans = [await fan_out(every[0], count, run_dir) for count in (1, 2, 4)]
    show("ZeroMQ, replicas that pull at once", fans)
    pauses = [{"gb": gb, **await pause_ms(gb, run_dir)} for gb in (0.1, 0.3, 1.0) if gb <= max_gb]
    show("pause between two tokens at the switch, and a token, ms", pauses)
    shares = await demo_delta_shares()
    show("share of the demo's model that a delta of one step moves", [shares])
    return {
        "shm_over_memcpy": min(row["over_memcpy"] for row in stages),
        "verify_gb_s": statistics.median(row["verify_gb_s"] for row in stages),
        "zmq_over_loopback": pulls[-1]["over_loopback"],
        "trainer_bytes_over_model": fans[-1]["sent_over_model"],
        "pause_ms_by_gb": {f"{row['gb']:g}": round(row["pause_ms"], 3) for row in pauses},
        "delta_bytes_share": shares["float32"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--max-gb", type=float, default=2.0, help="largest model; needs 3 x that")
    arguments = parser.parse_args()
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as directory:
        found = asyncio.run(measure(arguments.max_gb, Path(directory)))
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}
    print(json.dumps({"bench": "weights", **rounded}))


if __name__ == "__main__":
    main()
