"""A policy with one weight: the logit of the token that echoes the prompt; all others are 0."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import Key
from asyncflow_core.errors import (
    DataError,
    ServiceClosedError,
    ServiceError,
    UnsupportedCapabilityError,
)
from asyncflow_core.parts import PartContext
from asyncflow_core.services.rollout import (
    Completion,
    GenerateRequest,
    Rollout,
    RolloutStats,
    SamplingParams,
    StagedWeights,
    SwitchMode,
)
from asyncflow_core.services.weight_sync import (
    Checksum,
    TensorSpec,
    WeightSource,
    check_bucket,
    check_tensors,
)
from asyncflow_echo.plugin import CAPABILITIES, EchoOptions

__all__ = ["WEIGHT", "EchoRollout"]

WEIGHT = TensorSpec("echo.weight", "F32", (1, 1))


class EchoRollout(Rollout):
    """Each request is a task that makes a token whenever the loop comes round to it."""

    def __init__(self, options: EchoOptions, ctx: PartContext) -> None:
        self._vocab, self._name, self._open = options.vocab_size, ctx.name or "echo", False

    async def open(self) -> None:
        self._open, self._version, self._weight, self._tokens = True, 0, 0.0, 0
        self._staged: tuple[int, float] | None = None
        self._known: set[GenerateRequest] = set()  # waiting and running
        self._running: set[GenerateRequest] = set()
        self._aborted: set[GenerateRequest] = set()
        self._admits, self._idle = asyncio.Event(), asyncio.Event()
        self._admits.set()

    async def aclose(self) -> None:
        if self._open:
            self._open = False
            self._admits.set()  # whoever waits finds it closed

    def _check_open(self) -> None:
        if not self._open:
            raise ServiceClosedError(f"{self._name} is not open", service=self._name)

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        self._check_open()
        for request in requests:  # all of them before the first starts
            self._check(request)
        self._known.update(requests)
        tasks = [asyncio.create_task(self._sample(request)) for request in requests]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            for task in tasks:
                task.cancel()
            self._known.difference_update(requests)
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, request: GenerateRequest) -> None:
        ids, plain = request.prompt_ids, SamplingParams()
        if not len(ids) or ids.min() < 0 or ids.max() >= self._vocab:
            raise DataError(f"request {request.key}: a prompt is 1 or more ids below {self._vocab}")
        if request.sampling.max_new_tokens < 1:
            raise DataError(f"request {request.key}: max_new_tokens is 1 or more")
        wanted = [f.name for f in fields(plain) if f.name not in CAPABILITIES.sampling]
        wrong = [n for n in wanted if getattr(request.sampling, n) != getattr(plain, n)]
        if wrong or request.prefix is not None:
            raise UnsupportedCapabilityError(f"{self._name} knows no {wrong or 'prefix'}")

    async def _sample(self, request: GenerateRequest) -> Completion:
        while not self._admits.is_set():  # a drain goes on
            await self._admits.wait()
        self._check_open()
        tokens: list[int] = []
        logprobs: list[float] = []
        self._running.add(request)
        try:
            while len(tokens) < request.sampling.max_new_tokens and request not in self._aborted:
                logprob_V = self._logprobs(request, len(tokens))
                token = int(logprob_V.argmax())
                if request.sampling.temperature > 0:
                    rng = np.random.default_rng([request.seed, len(tokens)])  # not by what runs
                    token = int(rng.choice(self._vocab, p=np.exp(logprob_V)))
                tokens.append(token)
                logprobs.append(float(logprob_V[token]))
                self._tokens += 1
                await asyncio.sleep(0)
                self._check_open()
        finally:
            self._running.discard(request)
            self._known.discard(request)
            if not self._running:
                self._idle.set()
        reason = "abort" if request in self._aborted else "length"
        self._aborted.discard(request)
        runs = np.array([[self._version, len(tokens)]] if tokens else [], np.int32).reshape(-1, 2)
        return Completion(
            request.key, np.array(tokens, np.int32), np.array(logprobs, np.float32), runs, reason
        )

    def _logprobs(self, request: GenerateRequest, position: int) -> NDArray[np.float64]:
        """Over the whole vocabulary [V]; a greedy draw has those of temperature 1."""
        logits = np.zeros(self._vocab)
        logits[request.prompt_ids[position % len(request.prompt_ids)]] = self._weight
        logits /= request.sampling.temperature or 1.0
        result: NDArray[np.float64] = logits - np.logaddexp.reduce(logits)
        return result

    async def stage_weights(self, source: WeightSource) -> StagedWeights:
        self._check_open()
        start, checksum, found = time.perf_counter(), Checksum(), []
        if source.buckets is None:
            raise UnsupportedCapabilityError(f"{self._name} takes buckets, not a {source.kind}")
        check_tensors(source.manifest.tensors, [WEIGHT])
        async for bucket in source.buckets:
            check_bucket(bucket)
            check_tensors(bucket.specs, [WEIGHT])
            found.append(np.frombuffer(bucket.tensor_bytes(bucket.specs[0]).tobytes(), "<f4"))
            checksum.add(WEIGHT.name, WEIGHT.dtype, WEIGHT.shape, found[-1])  # of what lies here
        if len(found) != 1:
            raise DataError(f"{WEIGHT.name} came {len(found)} times, not once")
        version = source.manifest.version
        self._staged = version, float(found[0][0])
        wall_s = time.perf_counter() - start
        return StagedWeights(version, checksum.hexdigest(), WEIGHT.nbytes, wall_s)

    async def commit_weights(self, version: int, mode: SwitchMode) -> None:
        self._check_open()
        if mode not in CAPABILITIES.switch_modes:
            raise UnsupportedCapabilityError(f"{self._name} cannot {mode}, only drain")
        if self._staged is None or self._staged[0] != version:
            raise ServiceError(f"{self._name} has not staged {version}", service=self._name)
        self._admits.clear()
        try:
            while self._running:
                self._idle.clear()
                await self._idle.wait()
            self._check_open()
            (self._version, self._weight), self._staged = self._staged, None
        finally:
            self._admits.set()

    async def abort(self, keys: Sequence[Key] | None = None) -> int:
        self._check_open()
        chosen = {r for r in self._known if keys is None or r.key in keys} - self._aborted
        self._aborted |= chosen
        return len(chosen)

    async def stats(self) -> RolloutStats:
        self._check_open()
        running = len(self._running)
        return RolloutStats(
            self._version, running, len(self._known) - running, tokens_generated=self._tokens
        )
