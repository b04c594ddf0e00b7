"""One row from put to reader at several paces, beside two bare socket hops in the same processes.

The bare hops carry 200 bytes from a producer through a relay to a consumer with nothing but `send`
and `recv` in Python: what this machine takes to wake three processes whose caches have gone cold.

The controller's rehearsals (`rehearsal.py`) are compared with a store that has none, by latency and
by what the store's processes take of a core meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import struct
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from asyncflow_store_zmq.store import ZmqDataStore

if TYPE_CHECKING:
    from store import Ours

    Store = tuple[Ours, ZmqDataStore]

GAPS_S = (0.002, 0.005, 0.02)
TURNS = 3
ROWS = 200
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


def cpu_s(store: ZmqDataStore) -> float:
    """Processor time of controller and shards."""
    stats = [Path(f"/proc/{pid}/stat").read_text() for pid in store.processes.pids]
    fields = [text.rpartition(")")[2].split() for text in stats]
    return sum(int(part) for line in fields for part in line[11:13]) / os.sysconf("SC_CLK_TCK")


def by_pace(rehearsing: Store, plain: Store) -> dict[str, float]:
    """Print a table, medians of three turns by the gap between rows."""
    head = "put to got, p50 ms", "not rehearsing", "two bare hops", "% of a core", "not rehearsing"
    print(f"{'rows apart':12}" + "".join(f"{name:>20}" for name in head))
    result = {}
    for gap_s in GAPS_S:
        turns = []
        for _ in range(TURNS):
            turn = []
            for ours, store in (rehearsing, plain):
                before, start = cpu_s(store), time.monotonic()
                latency = ours.latency(gap_s, ROWS)
                turn += [latency, 100 * (cpu_s(store) - before) / (time.monotonic() - start)]
            turns.append([turn[0], turn[2], bare_hops(gap_s), turn[1], turn[3]])
        found = [statistics.median(values) for values in zip(*turns, strict=True)]
        name = f"{gap_s * 1e3:.0f}ms"
        print(f"{name:12}" + "".join(f"{value:20.2f}" for value in found))
        result[f"latency_{name}_apart_ms"], result[f"latency_{name}_apart_plain_ms"] = found[:2]
        result["bare_hops_ms"], result["rehearsal_core_percent"] = found[2], found[3] - found[4]
    return result
