"""Engines that take the time of real ones and no processor: for `benchmarks/workflow.py`.

Everything else is real: processes, store, leases, weights (`gigabytes` of them, copied and verified
at every version). Loads are fixed: every batch has the same lengths, shuffled by its number. What
an engine did when is appended to a file a process, for the shares that the benchmark prints.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from asyncflow_core.batch import Batch, Key
from asyncflow_core.config import Section
from asyncflow_core.errors import ServiceError
from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registrar
from asyncflow_core.services.rollout import (
    Completion,
    GenerateRequest,
    Rollout,
    RolloutCapabilities,
    RolloutStats,
    StagedWeights,
    SwitchMode,
)
from asyncflow_core.services.trainer import (
    ForwardBackwardInfo,
    LossCapabilities,
    LossOutput,
    LossSpec,
    Trainer,
    TrainerCapabilities,
    TrainerStats,
    UpdateInfo,
)
from asyncflow_core.services.weight_sync import Bucket, Checksum, TensorSpec, WeightSource

GROUPS, SAMPLES = 8, 8
ROWS = GROUPS * SAMPLES
TOKEN_S = 0.005
TENSOR_BYTES = 64 << 20
VARIABLE = "ASYNCFLOW_EMULATED"


@dataclass(frozen=True)
class Loads:
    """Pure work a step, in steps of `step_s` seconds (the trainer's own is 1).

    Attributes:
        log_dir: where each process writes what it did.
        step_s: seconds of a step's training.
        rollout: of all slots of all replicas together, packed without a gap.
        slots: of all replicas.
        longest: the longest response. sigma: of the lognormal lengths.
        reference, reward, advantage: of one worker each.
        gigabytes: of weights.
    """

    log_dir: str
    step_s: float = 2.0
    rollout: float = 0.93
    slots: int = 16
    longest: float = 0.8
    sigma: float = 1.0
    reference: float = 0.55
    reward: float = 0.35
    advantage: float = 0.20
    gigabytes: float = 1.0

    def to_environment(self) -> dict[str, str]:
        """For the processes of a run."""
        return {VARIABLE: json.dumps(self.__dict__)}


@cache
def loads() -> Loads:
    """Of this process."""
    return Loads(**json.loads(os.environ[VARIABLE]))


@cache
def lengths() -> NDArray[np.int64]:
    """Tokens of a batch's responses, ascending [64]: quantiles of the cut lognormal."""
    load = loads()
    normal = statistics.NormalDist()
    drawn = np.exp([load.sigma * normal.inv_cdf((i + 0.5) / ROWS) for i in range(ROWS)])
    mean, low, high = load.rollout * load.slots / ROWS, 0.0, 1.0
    for _ in range(60):  # the scale at which the mean is right once the longest are cut
        scale = (low + high) / 2
        if np.minimum(scale * drawn, load.longest).mean() < mean:
            low = scale
        else:
            high = scale
    steps = np.minimum(low * drawn, load.longest)
    return np.maximum(1, np.rint(steps * load.step_s / TOKEN_S)).astype(np.int64)


def length_of(key: Key) -> int:
    """Tokens of one response, by its key alone."""
    batch, place = divmod(key.sequence, GROUPS)
    order = np.random.default_rng(batch).permutation(ROWS)
    return int(lengths()[order[place * SAMPLES + key.sample]])


class Log:
    """Lines of JSON: [what, start, end, number], seconds of the machine's monotonic clock."""

    def __init__(self, name: str) -> None:
        self._file = open(Path(loads().log_dir) / f"{name}.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def add(self, what: str, start: float, end: float, number: int = 0) -> None:
        """Write one line."""
        self._file.write(json.dumps([what, start, end, number]) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(slots=True)
class _Slots:
    """Which sequences run, and since when none does."""

    free: asyncio.Semaphore
    running: int = 0
    idle_since: float = field(default_factory=time.monotonic)
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> float | None:
        """One more runs; since when none did, if it is the first."""
        self.running += 1
        self.drained.clear()
        return self.idle_since if self.running == 1 else None

    def end(self) -> None:
        """One has ended."""
        self.running -= 1
        if not self.running:
            self.idle_since = time.monotonic()
            self.drained.set()


class EmulatedOptions(Section):
    """Options of the emulated rollout."""

    slots: int = Field(8, ge=1)
    """Sequences decoded at once, each at the same speed."""


class EmulatedRollout(Rollout):
    """A slot is taken for as long as its response takes; new weights serve from the next token."""

    def __init__(self, options: EmulatedOptions, ctx: PartContext) -> None:
        self._options = options
        self._name = ctx.name

    async def open(self) -> None:
        """Allocate both sets of weights."""
        self._log = Log(self._name)
        self._slots = _Slots(asyncio.Semaphore(self._options.slots))
        self._slots.drained.set()
        self._switches: list[tuple[float, int]] = [(0.0, 0)]
        self._sets = [np.empty(_nbytes(), np.uint8) for _ in range(2)]
        for memory in self._sets:
            memory[::4096] = 0  # the pages are there before anything is timed
        self._staged: int | None = None
        self._staged_at = 0.0
        self._tokens = 0
        self._busy_s = 0.0

    async def aclose(self) -> None:
        """Write the last gap."""
        if hasattr(self, "_log"):
            self._log.close()

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Yield each when it ends."""
        ended: asyncio.Queue[Completion] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(self._respond(request, ended))
            for _ in requests:
                yield await ended.get()

    async def _respond(self, request: GenerateRequest, ended: asyncio.Queue[Completion]) -> None:
        async with self._slots.free:
            start, tokens = time.monotonic(), length_of(request.key)
            idle_since = self._slots.begin()
            if idle_since is not None:
                self._log.add("idle", idle_since, start)
            await asyncio.sleep(start + tokens * TOKEN_S - time.monotonic())
            self._slots.end()
            self._tokens += tokens
            self._busy_s += tokens * TOKEN_S / self._options.slots
        ended.put_nowait(
            Completion(
                request.key,
                np.zeros(tokens, np.int32),
                np.zeros(tokens, np.float32),
                self._versions(start, tokens),
                "length",
            )
        )

    def _versions(self, start: float, tokens: int) -> NDArray[np.int32]:
        """Runs of equal version [R, 2], from when each began to serve."""
        times = [at for at, _ in self._switches]
        firsts = [min(tokens, max(0, math.ceil((at - start) / TOKEN_S))) for at in times]
        counts = np.diff([*firsts, tokens])
        runs = [(v, n) for (_, v), n in zip(self._switches, counts, strict=True) if n > 0]
        return np.array(runs, np.int32).reshape(-1, 2)

    async def stage_weights(self, source: WeightSource) -> StagedWeights:
        """Copy every bucket into the second set; the checksum is of what lies there."""
        start, checksum, used = time.monotonic(), Checksum(), 0
        assert source.buckets is not None
        async for bucket in source.buckets:
            for spec in bucket.specs:
                into = self._sets[1][used : used + spec.nbytes]
                await asyncio.to_thread(
                    checksum.add,
                    spec.name,
                    spec.dtype,
                    spec.shape,
                    bucket.tensor_bytes(spec),
                    into=into,
                )
                used += spec.nbytes
        self._staged = source.manifest.version
        end = time.monotonic()
        self._log.add("stage", start, end, self._staged)
        return StagedWeights(self._staged, checksum.hexdigest(), used, end - start)

    async def commit_weights(self, version: int, mode: SwitchMode) -> None:
        """Exchange the sets."""
        start = time.monotonic()
        if version != self._staged:
            raise ServiceError(f"version {self._staged} is staged, not {version}")
        if mode is SwitchMode.DRAIN:
            await self._slots.drained.wait()
        self._sets.reverse()
        self._staged = None
        self._switches = [*self._switches[-8:], (time.monotonic(), version)]
        self._log.add("commit", start, time.monotonic(), version)

    async def abort(self, keys: Sequence[Key] | None = None) -> int:
        """Nothing here ends before its time."""
        return 0

    async def stats(self) -> RolloutStats:
        """Load and work."""
        return RolloutStats(
            self._switches[-1][1], self._slots.running, 0, self._tokens, self._busy_s
        )


def _nbytes() -> int:
    return round(loads().gigabytes * 1e9 / TENSOR_BYTES) * TENSOR_BYTES


class NoOptions(Section):
    """None."""


class EmulatedTrainer(Trainer):
    """Every response token takes the same time; a batch takes one step of one rank."""

    def __init__(self, options: NoOptions, ctx: PartContext) -> None:
        self._name, self._rank = ctx.name, ctx.rank

    async def open(self) -> None:
        """Allocate the weights."""
        self._log = Log(self._name)
        self._weights = [
            np.zeros(TENSOR_BYTES // 4, np.float32) for _ in range(_nbytes() // TENSOR_BYTES)
        ]
        for tensor in self._weights:
            tensor[::1024] = 1.0
        self._token_s = loads().step_s / int(lengths().sum())
        self._updates = self._tokens = 0
        self._busy_s = 0.0
        self._overslept = 0.0

    async def aclose(self) -> None:
        """Close the log."""
        if hasattr(self, "_log"):
            self._log.close()

    async def forward(self, batch: Batch) -> Batch:
        """Nobody asks for it."""
        raise NotImplementedError

    async def forward_backward(
        self, batch: Batch, loss: LossSpec | str, *, last: bool
    ) -> ForwardBackwardInfo:
        """Take the batch's time; what a timer overslept is taken off the next."""
        start = time.monotonic()
        tokens = int(batch["response_ids"].lengths.sum()) if batch.rows else 0
        work = tokens * self._token_s
        due = start + work - self._overslept
        await asyncio.sleep(due - time.monotonic())
        self._overslept = max(0.0, time.monotonic() - due)
        self._log.add("work", start, time.monotonic(), self._updates)
        self._busy_s += work
        self._tokens += tokens
        return ForwardBackwardInfo(0.0, float(tokens), tokens, batch.rows)

    async def optim_step(self) -> UpdateInfo:
        """Change every tensor a little."""
        start = time.monotonic()
        self._updates += 1
        for tensor in self._weights:
            tensor[0] = self._updates
        self._log.add("update", start, time.monotonic(), self._updates)
        return UpdateInfo(self._updates, 0.0, 0.0, 1.0)  # of all ranks, which say the same

    async def zero_grad(self) -> None:
        """There are no gradients."""

    async def export_weights(self, version: int) -> AsyncIterator[Bucket]:
        """Views of the weights themselves, of the first rank."""
        start = time.monotonic()
        for number, tensor in enumerate(() if self._rank else self._weights):
            spec = TensorSpec(f"layer.{number}", "F32", tensor.shape)
            yield Bucket((spec,), tensor.view(np.uint8))
        self._log.add("export", start, time.monotonic(), version)

    async def save(self, path: str) -> None:
        """Not part of the benchmark."""
        raise NotImplementedError

    async def load(self, path: str) -> None:
        """Not part of the benchmark."""
        raise NotImplementedError

    async def stats(self) -> TrainerStats:
        """Work done."""
        return TrainerStats(self._updates, self._tokens, self._busy_s)


def _take(seconds: float) -> None:
    time.sleep(max(0.0, seconds))


def reference(batch: Batch) -> dict[str, Any]:
    """Log-probs of a reference: time by the token."""
    tokens = batch["response_ids"].lengths
    _take(loads().reference * loads().step_s * tokens.sum() / lengths().sum())
    return {"ref_logprobs": [np.zeros(n, np.float32) for n in tokens]}


def reward(batch: Batch) -> dict[str, Any]:
    """A verifier: time by the row."""
    _take(loads().reward * loads().step_s * batch.rows / ROWS)
    return {"reward": np.zeros(batch.rows, np.float32)}


def advantage(batch: Batch) -> dict[str, Any]:
    """Of whole groups: time by the row."""
    _take(loads().advantage * loads().step_s * batch.rows / ROWS)
    return {"advantages": [np.zeros(n, np.float32) for n in batch["response_ids"].lengths]}


def _loss(logprobs: Any, columns: Any, config: Any) -> LossOutput:
    raise NotImplementedError("the emulated trainer computes no loss")


@hookimpl
def asyncflow_register(registrar: Registrar) -> None:
    """Offer the engines."""
    registrar.add(
        "rollout",
        "emulated",
        EmulatedRollout,
        api_version=1,
        options=EmulatedOptions,
        capabilities=RolloutCapabilities(
            switch_modes=frozenset({SwitchMode.IN_FLIGHT, SwitchMode.DRAIN})
        ),
    )
    registrar.add(
        "trainer",
        "emulated",
        EmulatedTrainer,
        api_version=1,
        options=NoOptions,
        capabilities=TrainerCapabilities(
            loss_arrays="numpy", overlapped_export=True, max_world_size=None
        ),
    )
    registrar.add(
        "loss",
        "emulated",
        lambda options, ctx: _loss,
        api_version=1,
        options=NoOptions,
        capabilities=LossCapabilities(
            "numpy", ("behaviour_logprobs", "advantages", "ref_logprobs")
        ),
    )
