"""AsyncHZP against FSDP2 on a slow link: `make bench BENCH=hzp` (root).

Two network namespaces joined by a veth pair, each end limited by tbf to 1 Gbit/s; a rank (or two) in
each, one core a namespace. Every variant has its own processes, all started first; then they make
one step each in turn, so that the machine's other work falls on all alike.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("hzp_worker.py")
RATE = "1gbit"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def slow_link(name: str) -> Iterator[tuple[str, str]]:
    """Two namespaces joined at RATE; they are gone afterwards."""
    spaces = (f"{name}a", f"{name}b")
    with ExitStack() as stack:
        for space in spaces:
            ip("netns", "add", space)
            stack.callback(subprocess.run, ["ip", "netns", "del", space], check=False)
        ip("link", "add", "hzp", "netns", spaces[0], "type", "veth", "peer", "hzp", "netns", spaces[1])
        for number, space in enumerate(spaces):
            ip("-n", space, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "hzp")
            for device in ("hzp", "lo"):
                ip("-n", space, "link", "set", device, "up")
            words = f"qdisc add dev hzp root tbf rate {RATE} burst 128kb latency 50ms"
            subprocess.run(["tc", "-n", space, *words.split()], check=True)
        yield spaces


class Variant:
    """The processes of one variant."""

    def __init__(
        self, spaces: Sequence[str], port: int, kind: str, *, world: int = 2, **options: Any
    ) -> None:
        self.seconds: list[float] = []
        self.answers: list[list[dict[str, Any]]] = []
        self._processes = []
        for rank in range(world):
            node = rank * 2 // world
            order = {"rank": rank, "world": world, "core": node, "kind": kind, "options": options}
            environment = {
                **os.environ,
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "hzp",
                "OMP_NUM_THREADS": "1",
                "LOCAL_WORLD_SIZE": str(world // 2),
            }
            self._processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", spaces[node], sys.executable, WORKER, json.dumps(order)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment,
                    text=True,
                )
            )

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(process.stdout.readline()) for process in self._processes]

    def ask(self, command: str) -> list[dict[str, Any]]:
        for process in self._processes:
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        return self.read()

    def step(self) -> None:
        answer = self.ask("step")
        self.answers.append(answer)
        self.seconds.append(max(one["s"] for one in answer))

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def close(self) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    only = sys.argv[2].split(",") if len(sys.argv) > 2 else None
    plans = {
        "link": ("link", {}),
        "hzp": ("hzp", {"sizes": [2, 2, 2]}),
        "sync": ("hzp", {"sizes": [2, 2, 2], "lanes": False}),
        "compute": ("hzp", {"sizes": [2, 2, 2], "local": True}),
        "fsdp2": ("fsdp2", {}),
        "fsdp2 prefetch 1": ("fsdp2", {"prefetch": 1}),
        "fsdp2 prefetch 2": ("fsdp2", {"prefetch": 2}),
        "fsdp2 no reshard": ("fsdp2", {"reshard": False}),
    }
    with slow_link(f"hzp{os.getpid()}") as spaces, ExitStack() as stack:
        variants = {}
        for number, (name, (kind, options)) in enumerate(plans.items()):
            if only and name not in only:
                continue
            variants[name] = Variant(spaces, 29600 + number, kind, **options)
            stack.callback(variants[name].close)
            variants[name].read()
        for _ in range(rounds):
            for variant in variants.values():
                variant.step()
        for name, v in variants.items():
            last = v.answers[-1]
            print(f"{name:18} {v.median*1e3:7.0f} ms  min {min(v.seconds)*1e3:7.0f} max {max(v.seconds)*1e3:7.0f} peak {last[0]['peak']/1e6:6.0f} MB sent {last[0]['sent']/1e6:6.1f} value {last[0]['value']}")


if __name__ == "__main__":
    main()
