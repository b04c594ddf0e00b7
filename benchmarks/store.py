"""The data store `zmq` beside TransferQueue 0.1.11, on the same rows, in one run.

Run: `make bench BENCH=store`, or `python benchmarks/store.py [--rounds N] [--no-peer]`. The peer
gets a cached environment of its own ($XDG_CACHE_HOME/asyncflow/HASH), which is made here. Rounds
of both alternate; shown are medians (least - most). The last line is JSON: ours over the better
median of the peer with 1 and 2 storage units, and our own figures.

`put` writes by the streaming writer: up to 8 puts wait for their answers, the clock stops when all
have come. `get` reads by the streaming reader: up to 64 rows, or one micro-batch, are prefetched,
and commits ride along with the next request. `plain` are one blocking put, and three blocking
calls.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import numpy as np
from store_rows import OPERATIONS, PIPELINE_BATCH, PIPELINE_ROWS, Rows

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_store_zmq.blocking import BlockingStore
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

HERE = Path(__file__).resolve().parent
PEER = "transferqueue==0.1.11\npsutil\n--constraint torch==2.13.0\n"
COLUMNS = ("prompt", "response_ids", "behaviour_logprobs", "reward")
PRODUCED = (*COLUMNS[:3], "ts")
now = time.perf_counter


def as_batch(rows: Rows, **more: Column) -> Batch:
    """The rows as our store wants them; not timed."""
    return Batch(
        {
            "prompt": Column.dense(rows.prompts),
            "response_ids": Column.ragged(rows.responses),
            "behaviour_logprobs": Column.ragged(rows.logprobs),
            "reward": Column.dense(rows.rewards),
            **more,
        }
    )


class Keys:
    """Keys never used before in this process's source."""

    def __init__(self, source: int) -> None:
        self._source, self._next = source, 0

    def __call__(self, count: int) -> list[GroupKey]:
        start, self._next = self._next, self._next + count
        return [GroupKey(self._source, 0, number) for number in range(start, start + count)]


class Ours:
    """Measures a running store as a client without an event loop."""

    def __init__(self, connect: str, token: str) -> None:
        self.address, self.token = connect, token
        self.store = BlockingStore(connect, token=token)
        self.store.open()
        self.keys = Keys(0)
        self.sources = 1

    @classmethod
    def of(cls, store: ZmqDataStore) -> Self:
        options = store.attach_options()
        return cls(options["connect"], options["token"])

    def put(self, batch: int, *, plain: bool = False) -> float:
        task = self.store.register(TaskSpec("put", COLUMNS))
        count = OPERATIONS[batch]
        data = [as_batch(Rows(batch, seed)) for seed in range(min(count, 16))]
        keys = [self.keys(batch) for _ in range(count)]
        start = now()
        if plain:
            for i in range(count):
                self.store.put(data[i % len(data)], keys=keys[i])
        else:
            writer = self.store.writer()
            for i in range(count):
                writer.put(data[i % len(data)], keys=keys[i])
            writer.flush()
        seconds = now() - start
        self.store.end(task)
        return count * batch / seconds

    def get(self, batch: int, *, plain: bool = False) -> float:
        task = self.store.register(TaskSpec("train", COLUMNS))
        count, rows = OPERATIONS[batch], 0
        data = [as_batch(Rows(batch, seed)) for seed in range(min(count, 16))]
        for i in range(count):
            self.store.put(data[i % len(data)], keys=self.keys(batch))
        start = now()
        if plain:
            for _ in range(count):
                lease = self.store.lease("train", requester="bench", limit_rows=batch)
                rows += self.store.read(lease.ref(), COLUMNS).rows
                self.store.commit(lease.ref())
        else:
            reader = self.store.reader(
                "train", COLUMNS, requester="bench", limit_rows=batch, total_rows=count * batch
            )
            for item in reader:
                rows += item.batch.rows
                reader.commit(item)
            reader.close()
        seconds = now() - start
        assert rows == count * batch
        self.store.end(task)
        return rows / seconds

    def _processes(self, roles: list[str], rows: int, batch: int, gap_s: float) -> list[dict]:
        source, self.sources = self.sources, self.sources + 1
        tasks = [self.store.register(spec) for spec in _specs(roles)]
        arguments = [self.address, self.token, str(source), str(rows), str(batch), str(gap_s)]
        found = [
            subprocess.Popen(
                [sys.executable, __file__, "--role", role, *arguments], stdout=subprocess.PIPE
            )
            for role in roles
        ]
        answers = [json.loads(process.communicate()[0]) for process in found]
        for task in tasks:
            self.store.end(task)
        return answers

    def pipeline(self) -> float:
        roles = ["reward", "train", "produce"]
        _, train, produce = self._processes(roles, PIPELINE_ROWS, PIPELINE_BATCH, 0)
        return PIPELINE_ROWS / (train["end"] - produce["start"])

    def latency(self, gap_s: float = 0.02, rows: int = 50) -> float:
        """Median milliseconds of one row from before its put to its arrival, `gap_s` apart."""
        train, _ = self._processes(["arrive", "produce"], rows, 1, gap_s)
        return statistics.median(train["waits"]) * 1e3


def _specs(roles: list[str]) -> list[TaskSpec]:
    if "arrive" in roles:
        return [TaskSpec("train", PRODUCED)]
    return [
        TaskSpec("reward", ("response_ids",), ("reward",)),
        TaskSpec("train", (*PRODUCED, "reward")),
    ]


def role(name: str, address: str, token: str, source: str, rows: str, batch: str, gap: str) -> None:
    """One process of the pipeline."""
    count, size, gap_s = int(rows), int(batch), float(gap)
    answer: dict = {}
    with BlockingStore(address, token=token, name=f"{name}-{source}") as store:
        if name == "produce":
            answer["start"] = _produce(store, Keys(int(source)), count, size, gap_s)
        else:
            reads = ("response_ids",) if name == "reward" else (*PRODUCED, "reward")
            reads = PRODUCED if name == "arrive" else reads
            task = "reward" if name == "reward" else "train"
            reader = store.reader(
                task, reads, requester=name, limit_rows=size, total_rows=count, wait_s=30.0
            )
            waits: list[float] = []
            for item in reader:
                waits += (now() - item.batch["ts"].array).tolist() if "ts" in item.batch else []
                writes = None
                if name == "reward":
                    sums = [float(ids.sum() % 7) for ids in item.batch["response_ids"]]
                    writes = Batch({"reward": Column.dense(sums, np.float32)})
                reader.commit(item, writes)
                answer["end"] = now()
            reader.close()
            answer["waits"] = waits
    print(json.dumps(answer))


def _produce(store: BlockingStore, keys: Keys, rows: int, batch: int, gap_s: float) -> float:
    stamp = np.empty(batch)  # its column is part of the batches, whose making is not timed
    ts = {"ts": Column.dense(stamp)}
    rows_of = [as_batch(Rows(batch, seed)).select(COLUMNS[:3]) for seed in range(16)]
    data = [groups.with_columns(ts) for groups in rows_of]
    time.sleep(0.5)  # the consumers are waiting by then
    writer = store.writer()
    start = now()
    for i in range(rows // batch):
        if gap_s:
            time.sleep(gap_s)
        named = keys(batch)
        stamp[:] = now()
        writer.put(data[i % 16], keys=named)
    writer.flush()
    return start


class PeerProcess:
    """The peer with some storage units; None for a value it could not give."""

    def __init__(self, python: Path, units: int) -> None:
        self._process = subprocess.Popen(
            [python, HERE / "store_peer.py", str(units)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._answer()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with {self._process.wait()}")
        return json.loads(line)

    def ask(self, command: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()


def peer_python() -> Path:
    """The peer's environment, made if it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "asyncflow"
    home = cache / hashlib.sha256(PEER.encode()).hexdigest()[:16]
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        print(f"making the peer's environment in {home} (minutes) ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        *packages, constraint = PEER.split("\n")[:-1]
        (home / "constraints.txt").write_text(constraint.split()[1] + "\n")
        install = [python, "-m", "pip", "install", "-q", "-c", home / "constraints.txt"]
        subprocess.run([*install, constraint.split()[1]], check=True)
        subprocess.run([*install, *packages], check=True)
        (home / "installed").touch()
    return python


TESTS = [f"{test} {batch}" for test in ("put", "get") for batch in OPERATIONS]
TESTS += ["pipeline", "latency"]


def measure(ours: Ours, test: str, *, plain: bool = False) -> float:
    name, *arguments = test.split()
    if arguments:
        return getattr(ours, name)(int(arguments[0]), plain=plain)
    return getattr(ours, name)()


def compare(ours: Ours, rounds: int, *, peer: bool) -> dict[str, dict[str, list[float]]]:
    """Alternate; a first round of each warms up and is not kept."""
    found: dict[str, dict[str, list[float]]] = {test: {} for test in TESTS}
    python = peer_python() if peer else None
    for units in (1, 2) if python else (0,):
        other = PeerProcess(python, units) if python else None
        for number in range(rounds + 1):
            for test in TESTS:
                values = {"ours": measure(ours, test)}
                if test.startswith(("get", "put")):
                    values["ours, plain"] = measure(ours, test, plain=True)
                if other is not None:
                    values[f"peer, {units} units"] = other.ask(test)
                if number:
                    for key, value in values.items():
                        found[test].setdefault(key, []).append(value)
            print(f"round {number} done", file=sys.stderr, flush=True)
        if other is not None:
            other.close()
    return found


def report(found: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Print the table; the ratios."""
    result = {}
    print(f"{'test':12} {'who':14} {'median':>10}  (least - most)")
    for test, values in found.items():
        medians = {who: statistics.median(runs) for who, runs in values.items()}
        unit = "ms" if test == "latency" else "rows/s"
        for who, runs in values.items():
            spread = f"({min(runs):,.1f} - {max(runs):,.1f})"
            print(f"{test:12} {who:14} {medians[who]:10,.1f}  {spread} {unit}")
        peers = [median for who, median in medians.items() if who.startswith("peer")]
        if test == "latency":
            result["latency_p50_ms"] = medians["ours"]
        elif peers:
            result[test.replace(" ", "_")] = medians["ours"] / max(peers)
    return result


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true")
    arguments = parser.parse_args()
    from store_latency import by_pace
    from store_memory import footprint, growth

    result: dict[str, float] = {}
    async with ZmqDataStore(ZmqOptions(capacity_rows=1 << 20)) as store:
        result |= await asyncio.to_thread(footprint, store)
    large = ZmqOptions(capacity_rows=1 << 21)
    async with ZmqDataStore(large) as few, ZmqDataStore(large) as many:
        result |= await asyncio.to_thread(growth, few, many)
    plain_options = ZmqOptions(capacity_rows=1 << 20, rehearse=False)
    async with (
        ZmqDataStore(ZmqOptions(capacity_rows=1 << 20)) as store,
        ZmqDataStore(plain_options) as plain_store,
    ):
        ours, plain = Ours.of(store), Ours.of(plain_store)
        found = await asyncio.to_thread(compare, ours, arguments.rounds, peer=not arguments.no_peer)
        result |= await asyncio.to_thread(by_pace, (ours, store), (plain, plain_store))
        ours.store.close()
        plain.store.close()
    ratios = report(found)
    print(json.dumps({key: round(value, 3) for key, value in {**ratios, **result}.items()}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--role"]:
        role(*sys.argv[2:])
    else:
        asyncio.run(main())
