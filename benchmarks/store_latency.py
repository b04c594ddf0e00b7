"""One row from put to reader at several paces, beside two bare socket hops in the same processes.

The bare hops carry 200 bytes from a producer through a relay to a consumer with nothing but `send`
and `recv` in Python: what this machine takes to wake three processes whose caches have gone cold.

Once more beside a busy client, whose own rows come every 2 ms in a partition of their own: the
controller's code and data then stay in the caches. That is what a controller would gain that
repeated its work on nothing while it waits.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from store_rows import Rows

from asyncflow_core.batch import GroupKey
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_store_zmq.blocking import BlockingStore

if TYPE_CHECKING:
    from store import Ours

GAPS_S = (0.002, 0.005, 0.02)
BUSY_GAP_S = 0.002
ROWS = 100
STAMP = struct.Struct("<d192x")


def _relay(taken: socket.socket, given: socket.socket) -> None:
    for _ in range(ROWS):
        given.send(taken.recv(4096))


def _consume(taken: socket.socket, answer: Connection) -> None:
    waits = []
    for _ in range(ROWS):
        data = taken.recv(4096)
        waits.append(time.perf_counter() - STAMP.unpack(data)[0])
    answer.send_bytes(struct.pack("<d", statistics.median(waits) * 1e3))


def bare_hops(gap_s: float) -> float:
    """Median milliseconds from one process through a second into a third."""
    context = multiprocessing.get_context("fork")
    first, second = (socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    receive, send = context.Pipe(duplex=False)
    processes = [
        context.Process(target=_relay, args=(first[1], second[0])),
        context.Process(target=_consume, args=(second[1], send)),
    ]
    for process in processes:
        process.start()
    for _ in range(ROWS):
        time.sleep(gap_s)
        first[0].send(STAMP.pack(time.perf_counter()))
    (found,) = struct.unpack("<d", receive.recv_bytes())
    for process in processes:
        process.join()
    for end in (*first, *second):
        end.close()
    return found


def keep_busy(address: str, token: str) -> None:
    """Put rows and read them back until killed; writes a line when it has begun."""
    from store import COLUMNS, as_batch  # which runs this file, too

    with (
        BlockingStore(address, token=token) as producer,
        BlockingStore(address, token=token) as consumer,
    ):
        consumer.register(TaskSpec("busy", COLUMNS[:3], partitions=("busy",)))
        writer = producer.writer(partition="busy")
        reader = consumer.reader("busy", COLUMNS[:3], requester="busy", limit_rows=1)
        data = [as_batch(Rows(1, seed)).select(COLUMNS[:3]) for seed in range(16)]
        source, number = 1 << 15 | os.getpid() % (1 << 15), 0
        while True:
            writer.put(data[number % 16], keys=[GroupKey(source, 0, number)])
            reader.commit(next(reader))
            if not number:
                print("busy", flush=True)
            number += 1
            time.sleep(BUSY_GAP_S)


@contextlib.contextmanager
def beside_a_busy_client(ours: Ours) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, __file__, ours.address, ours.token], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


def by_pace(ours: Ours) -> dict[str, float]:
    """Print a table; our medians by the gap between rows, and the bare hops' at the longest."""
    head = "put to got, p50 ms", "beside a busy client", "two bare hops, p50 ms"
    print(f"{'rows apart':12}" + "".join(f"{name:>24}" for name in head))
    result = {}
    for gap_s in GAPS_S:
        milliseconds = round(gap_s * 1e3)
        alone, beside, bare = [], [], []
        for _ in range(3):
            alone.append(ours.latency(gap_s))
            with beside_a_busy_client(ours):
                beside.append(ours.latency(gap_s))
            bare.append(bare_hops(gap_s))
        found = [statistics.median(times) for times in (alone, beside, bare)]
        print(f"{milliseconds:>7} ms  " + "".join(f"{value:24.2f}" for value in found))
        result[f"latency_{milliseconds}ms_apart_ms"] = found[0]
        result[f"latency_{milliseconds}ms_apart_beside_ms"] = found[1]
    result["bare_hops_ms"] = found[2]
    return result


if __name__ == "__main__":
    keep_busy(*sys.argv[1:])
