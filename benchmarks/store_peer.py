"""TransferQueue, measured by commands on standard input; runs in its own environment.

`benchmarks/store.py` starts it in a network namespace of its own (the peer binds its sockets to the
machine's public address). One JSON object a line comes back. Its fastest API for each test, as
found by trying: `client.put`, `get_meta` + `get_data`.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import statistics
import struct
import sys
import time

os.environ.setdefault("RAY_DEDUP_LOGS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TQ_NUM_THREADS", "2")  # else it logs a warning on every call on a small box


def own_network() -> None:
    """A namespace with nothing but the loopback."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "no network namespace; run as root")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS, IFF_UP


own_network()

import ray  # noqa: E402
import torch  # noqa: E402
import transfer_queue as tq  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from store_rows import OPERATIONS, PIPELINE_BATCH, PIPELINE_ROWS, Rows  # noqa: E402
from tensordict import TensorDict  # noqa: E402

FIELDS = ["prompt_ids", "response_ids", "old_logprobs", "reward"]
now = time.perf_counter


def as_tensors(rows: Rows) -> TensorDict:
    """The rows as the peer wants them; not timed."""
    jagged = torch.nested.as_nested_tensor
    return TensorDict(
        {
            "prompt_ids": torch.from_numpy(rows.prompts),
            "response_ids": jagged(
                [torch.from_numpy(r) for r in rows.responses], layout=torch.jagged
            ),
            "old_logprobs": jagged(
                [torch.from_numpy(r) for r in rows.logprobs], layout=torch.jagged
            ),
            "reward": torch.from_numpy(rows.rewards),
        },
        batch_size=[len(rows.responses)],
    )


def put(client, batch: int, number: int) -> float:
    count = OPERATIONS[batch]
    data = [as_tensors(Rows(batch, seed)) for seed in range(min(count, 16))]
    part = f"put{batch}_{number}"
    start = now()
    for i in range(count):
        client.put(data[i % len(data)], partition_id=part)
    seconds = now() - start
    client.clear_partition(part)
    return count * batch / seconds


def get(client, batch: int, number: int) -> float:
    count = OPERATIONS[batch]
    data = [as_tensors(Rows(batch, seed)) for seed in range(min(count, 16))]
    part = f"get{batch}_{number}"
    for i in range(count):
        client.put(data[i % len(data)], partition_id=part)
    rows = 0
    start = now()
    for _ in range(count):
        meta = client.get_meta(FIELDS, batch, part, task_name="train")
        rows += client.get_data(meta).batch_size[0]
    seconds = now() - start
    assert rows == count * batch
    client.clear_partition(part)
    return rows / seconds


@ray.remote(num_cpus=1)
class Worker:
    def __init__(self):
        torch.set_num_threads(1)
        tq.init()
        self.client = tq.get_client()

    def ping(self):
        return os.getpid()

    def produce(self, part, rows, batch, gap_s):
        data = [as_tensors(Rows(batch, seed)).exclude("reward") for seed in range(16)]
        start = now()
        for i in range(rows // batch):
            if gap_s:
                time.sleep(gap_s)
            one = data[i % 16]
            one["ts"] = torch.full((batch,), now(), dtype=torch.float64)
            self.client.put(one, partition_id=part)
        return start

    def reward(self, part, rows, batch):
        done = 0
        while done < rows:
            meta = self.client.get_meta(["response_ids"], batch, part, task_name="reward")
            if meta.size == 0:
                time.sleep(0.001)
                continue
            data = self.client.get_data(meta)
            values = [float(x.sum() % 7) for x in data["response_ids"].unbind()]
            reward = torch.tensor(values, dtype=torch.float32)
            self.client.put(TensorDict({"reward": reward}, batch_size=[meta.size]), metadata=meta)
            done += meta.size

    def train(self, part, rows, batch, fields):
        done, waits = 0, []
        while done < rows:
            meta = self.client.get_meta(fields, batch, part, task_name="train")
            if meta.size == 0:
                time.sleep(0.001)
                continue
            data = self.client.get_data(meta)
            waits += [now() - float(x) for x in data["ts"].reshape(-1)]
            done += meta.size
        return now(), waits


def pipeline(client, workers, number: int) -> float:
    part = f"pipe{number}"
    rewarding = workers[1].reward.remote(part, PIPELINE_ROWS, PIPELINE_BATCH)
    training = workers[2].train.remote(part, PIPELINE_ROWS, PIPELINE_BATCH, [*FIELDS, "ts"])
    start = ray.get(workers[0].produce.remote(part, PIPELINE_ROWS, PIPELINE_BATCH, 0))
    end, _ = ray.get(training)
    ray.get(rewarding)
    client.clear_partition(part)
    return PIPELINE_ROWS / (end - start)


def latency(client, workers, number: int) -> float:
    part, fields = f"lat{number}", ["prompt_ids", "response_ids", "old_logprobs", "ts"]
    training = workers[2].train.remote(part, 50, 1, fields)
    ray.get(workers[0].produce.remote(part, 50, 1, 0.02))
    _, waits = ray.get(training)
    client.clear_partition(part)
    return statistics.median(waits) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ray and the peer print does not belong among the answers
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=256 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    units = int(sys.argv[1])
    backend = {"SimpleStorage": {"num_data_storage_units": units}}
    tq.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": backend}))
    client = tq.get_client()
    workers = [Worker.remote() for _ in range(3)]
    ray.get([worker.ping.remote() for worker in workers])
    print(json.dumps("ready"), file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        test, *arguments = line.split()
        if test == "put":
            value = put(client, int(arguments[0]), number)
        elif test == "get":
            value = get(client, int(arguments[0]), number)
        elif test == "pipeline":
            value = pipeline(client, workers, number)
        else:
            value = latency(client, workers, number)
        print(json.dumps(value), file=answers, flush=True)
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
