"""A trainer or a replica of the fault tests, in a process of its own.

    process.py ADDRESS ROLE TRANSPORT OPTIONS RUN_DIR

It answers the controls of a real one over the wire, with a transport by name; the engine is an
array. Faults are set by calls of `Faults`.
"""

import ast
import asyncio
import os
import resource
import sys
import threading
import time
from pathlib import Path

import numpy as np

from asyncflow_core.flow.processes.control import RolloutControl, TrainerControl
from asyncflow_core.flow.weights.compare import first_difference
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registry
from asyncflow_core.services.rollout import RolloutStats, StagedWeights, SwitchMode
from asyncflow_core.services.weight_sync import (
    Bucket,
    Checksum,
    PublishedWeights,
    SupportsOverlappedFetch,
    TensorSpec,
    WeightSource,
)
from asyncflow_core.testing.weight_sync import read_directory
from asyncflow_core.wire import Server, serve_object

PIECE = 1 << 20
PIECES = 8


async def weights(version, pause_s):
    """PIECES buckets of PIECE bytes."""
    rng = np.random.default_rng(version)
    for number in range(PIECES):
        spec = TensorSpec(f"w{number}", "BF16", (PIECE // 2,))
        yield Bucket((spec,), rng.integers(0, 256, PIECE, np.uint8))
        await asyncio.sleep(pause_s)


class Faults:
    """Set from the test."""

    def __init__(self) -> None:
        self.pause_s = 0.0
        self.flips = 0
        self.damage = 0

    async def slow(self, pause_s: float) -> int:
        """Wait after every bucket; returns the process id."""
        self.pause_s = pause_s
        return os.getpid()

    async def flip(self, times: int) -> None:
        """Flip a bit of what comes in, so many times."""
        self.flips = times

    async def fill_disk(self, nbytes: int) -> None:
        """No file may grow beyond that."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

    async def damage_served(self) -> None:
        """Flip a bit of what serves from the next commit on, as an engine's own layout might."""
        self.damage += 1


class Trainer(TrainerControl):
    def __init__(self, sync, faults):
        self.sync, self.faults = sync, faults

    async def start(self) -> None:
        pass

    async def work(self):
        raise NotImplementedError

    async def step(self, version: int):
        raise NotImplementedError

    async def save_model(self, path: str) -> bool:
        return False

    async def save(self, path: str) -> None:
        raise NotImplementedError

    async def load(self, path: str) -> None:
        raise NotImplementedError

    async def publish(self, version: int, life: int) -> PublishedWeights:
        return await self.sync.publish(version, life, weights(version, self.faults.pause_s))

    async def coming(self, version: int, life: int) -> PublishedWeights | None:
        if not isinstance(self.sync, SupportsOverlappedFetch):
            return None
        return await self.sync.coming(version, life)

    async def retire(self, version: int, life: int) -> None:
        await self.sync.retire(version, life)


class Replica(RolloutControl):
    def __init__(self, sync, faults):
        self.sync, self.faults = sync, faults
        self.staged, self.serving, self.version = {}, {}, -1

    async def start(self) -> None:
        pass

    async def work(self):
        raise NotImplementedError

    async def abort(self, keys) -> int:
        raise NotImplementedError

    async def stage(self, published: PublishedWeights) -> StagedWeights:
        start, manifest = time.perf_counter(), published.manifest
        source = await self.fetch(published)
        taken, checksum = {}, Checksum()
        async for bucket in self.buckets(source):
            for spec in bucket.specs:
                data = bucket.tensor_bytes(spec).copy()
                if self.faults.flips:
                    self.faults.flips -= 1
                    data[1234] ^= 1
                taken[spec.name] = data
                checksum.add(spec.name, spec.dtype, spec.shape, data)
            await asyncio.sleep(self.faults.pause_s)
        self.staged = taken
        wall_s = time.perf_counter() - start
        return StagedWeights(manifest.version, checksum.hexdigest(), manifest.nbytes, wall_s)

    async def fetch(self, published):
        await self.sync.attach("replica", published)
        return await self.sync.fetch(published)

    async def buckets(self, source: WeightSource):
        if source.path is not None:
            for bucket in read_directory(Path(source.path)):
                yield bucket
            return
        async for bucket in source.buckets:
            yield bucket

    async def commit(self, version: int, mode: SwitchMode) -> None:
        self.serving, self.version = dict(self.staged), version
        if self.faults.damage:
            self.serving["w3"][77] ^= 8

    async def compare(self, published: PublishedWeights) -> str:
        return await first_difference(await self.fetch(published), self)

    async def read_weights(self, tensors):
        for spec in tensors:
            yield Bucket((spec,), self.serving[spec.name])

    async def stats(self) -> RolloutStats:
        return RolloutStats(version=self.version)


async def main(address, role, transport, options, run_dir):
    plugin = Registry().get("weight_sync", transport)
    context = PartContext(role, run_dir=Path(run_dir))
    faults = Faults()
    async with plugin.factory(plugin.parse_options(ast.literal_eval(options)), context) as sync:
        control = Trainer(sync, faults) if role == "trainer" else Replica(sync, faults)
        interface = TrainerControl if role == "trainer" else RolloutControl
        server = Server(address, name=role, token="t")
        serve_object(server, "control", control, interface=interface)
        serve_object(server, "faults", faults)
        async with server:
            await asyncio.Event().wait()


def end_with_the_test():
    """Standard input ends with the process that started this one, however it ends."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_the_test, daemon=True).start()
    asyncio.run(main(*sys.argv[1:]))
