"""How near the store comes to copying alone at batch 256, and what the rest of the time goes to.

Run: `python benchmarks/store_share.py [rounds]`. The limit is what this machine copies: the rows of
a batch into mapped shared memory, and out of it. Beside it the streaming writer and
reader (see `store.py`), the least time a batch of all rounds; then what a batch costs each side in
CPU time, and each stage of the client alone, without a store.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from store import COLUMNS, Keys, Ours, as_batch
from store_rows import OPERATIONS, Rows

from asyncflow_core.schema import validate
from asyncflow_store_zmq.arena import UNIT, Arena
from asyncflow_store_zmq.layout import Piece, pack, take
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.packed import dump_keys
from asyncflow_store_zmq.slabs import Slabs
from asyncflow_store_zmq.store import ZmqDataStore

BATCH = 256
SPOTS = 25  # an odd number, so that two in turn meet all


def least(function: Callable[[], object], repeats: int = 30) -> float:
    """Seconds of the fastest call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def stages() -> dict[str, float]:
    """Seconds a batch of what a client does, each alone, in memory that no cache holds."""
    batch, keys = as_batch(Rows(BATCH, 0)), Keys(0)(BATCH)
    packed = pack(batch)
    room = -(-packed.nbytes // UNIT) * UNIT
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        arena = Arena(Path(directory) / "arena", create=True)
        arena.reserve(UNIT, SPOTS * room)
        shared = [arena.data[UNIT + room * n :][: packed.nbytes] for n in range(SPOTS)]
        own = [np.ones(packed.nbytes, np.uint8) for _ in range(SPOTS)]
        for spot in shared:
            packed.write(spot)
        spots, slabs = itertools.cycle(range(SPOTS)), Slabs()

        def copy_out() -> None:
            piece = Piece(shared[next(spots)], packed.layout, BATCH, 0, BATCH)
            take([piece], COLUMNS, slabs.take)

        return {
            "bytes": packed.nbytes,
            "limit: copy in": least(lambda: np.copyto(shared[next(spots)], own[next(spots)])),
            "limit: copy out": least(lambda: np.copyto(own[next(spots)], shared[next(spots)])),
            "put: check the schema": least(lambda: validate(batch, keys)),
            "put: keys as bytes": least(lambda: dump_keys(keys, 3)),
            "put: lay out": least(lambda: pack(batch)),
            "put: copy in": least(lambda: packed.write(shared[next(spots)])),
            "get: copy out": least(copy_out),
        }


def cpu(pid: int) -> float:
    """Seconds a process has computed."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measure(ours: Ours, controller: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Of put and get: least seconds a batch, and the controller's CPU seconds a batch."""
    found = {}
    for name in ("put", "get"):
        walls, before = [], 0.0
        for number in range(rounds + 1):
            if number == 1:
                before = cpu(controller)
            walls.append(BATCH / getattr(ours, name)(BATCH))
        batches = OPERATIONS[BATCH] * rounds
        found[name] = min(walls[1:]), (cpu(controller) - before) / batches
    return found


async def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    alone = stages()
    async with ZmqDataStore(ZmqOptions(capacity_rows=1 << 20)) as store:
        options = store.attach_options()
        ours = Ours(options["connect"], options["token"])
        controller = store.processes.pids[-1]
        found = await asyncio.to_thread(measure, ours, controller, rounds)
        ours.store.close()
    size = alone.pop("bytes")
    for name, way in (("put", "in"), ("get", "out")):
        wall, busy = found[name]
        limit = alone[f"limit: copy {way}"]
        print(
            f"{name}: {wall * 1e6:.0f} us a batch of {size / 1e6:.1f} MB, {size / wall / 1e9:.1f} "
            f"GB/s; copying {way} alone {limit * 1e6:.0f} us, {size / limit / 1e9:.1f} GB/s; "
            f"share {limit / wall:.0%}; controller {busy * 1e6:.0f} us of CPU"
            + (" (with the puts before)" if name == "get" else "")
        )
    for name, seconds in alone.items():
        print(f"  {name}: {seconds * 1e6:.0f} us")


if __name__ == "__main__":
    asyncio.run(main())
