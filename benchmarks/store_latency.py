"""One row from put to reader at several paces, beside two bare socket hops in the same processes.

The bare hops carry 200 bytes from a producer through a relay to a consumer with nothing but `send`
and `recv` in Python: what this machine takes to wake three processes whose caches have gone cold.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import struct
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from store import Ours

GAPS_S = (0.002, 0.005, 0.02)
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


def by_pace(ours: Ours) -> dict[str, float]:
    """Print a table; our medians by the gap between rows, and the bare hops' at the longest."""
    print(f"{'rows apart':12} {'put to got, p50 ms':>20} {'two bare hops, p50 ms':>24}")
    result = {}
    for gap_s in GAPS_S:
        milliseconds = round(gap_s * 1e3)
        rows = [ours.latency(gap_s) for _ in range(3)]
        hops = statistics.median(bare_hops(gap_s) for _ in range(3))
        result[f"latency_{milliseconds}ms_apart_ms"] = statistics.median(rows)
        print(f"{milliseconds:>7} ms   {statistics.median(rows):20.2f} {hops:24.2f}")
    result["bare_hops_ms"] = hops
    return result
