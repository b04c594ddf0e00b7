"""A rollout engine over the tabular policy: continuous batching, one token a tick.

The engine is one asyncio task. A tick is synchronous, so whatever else happens (a switch of
weights, a pause, an abort) falls between two tokens, and every token is wholly of one version.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from asyncflow_core.batch import Key
from asyncflow_core.errors import (
    AsyncFlowError,
    EngineError,
    ServiceClosedError,
    ServiceError,
    UnsupportedCapabilityError,
)
from asyncflow_core.parts import PartContext
from asyncflow_core.reference.tabular import TabularModel, TabularOptions, draw_tokens, uniform
from asyncflow_core.reference.tabular_requests import TabularSequence, check_request
from asyncflow_core.reference.tabular_weights import read_weights
from asyncflow_core.services.rollout import (
    Completion,
    GenerateRequest,
    Rollout,
    RolloutCapabilities,
    RolloutStats,
    StagedWeights,
    SwitchMode,
)
from asyncflow_core.services.weight_sync import Bucket, TensorSpec, WeightSource, check_tensors

__all__ = ["TABULAR_ROLLOUT", "TabularRollout", "TabularRolloutOptions"]

TABULAR_ROLLOUT = RolloutCapabilities(
    switch_modes=frozenset(SwitchMode),
    weight_sources=frozenset({"buckets"}),
    sampling=frozenset(
        {"max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids"}
    ),
    prefix=True,
    seeds=True,
    pause=True,
    readback=True,
)


class TabularRolloutOptions(TabularOptions):
    """Options of the tabular rollout."""

    slots: int = Field(default=64, ge=1)
    """Sequences decoded at once."""
    eos_token_id: int | None = Field(default=None, ge=0)
    """Ends a response; None takes the run's tokenizer's, or none."""
    token_s: float = Field(default=0.0, ge=0.0)
    """Seconds a token takes, as if a larger model ran."""


@dataclass(slots=True)
class _Staged:
    version: int
    logits: NDArray[np.float64]


class TabularRollout(Rollout):
    """Serves the tabular policy. It owns two tables (serving, staged) and its sequences."""

    def __init__(self, options: TabularRolloutOptions, ctx: PartContext) -> None:
        """Keep the options; the table is made by `open`."""
        self._options = options
        self._ctx = ctx
        self._name = ctx.name or "tabular"
        tokenizer_ends = ctx.tokenizer.eos_token_ids if ctx.tokenizer else ()
        self._ends = frozenset(
            tokenizer_ends if options.eos_token_id is None else (options.eos_token_id,)
        )
        self._model: TabularModel | None = None
        self._engine: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None
        self._reset()

    def _reset(self) -> None:
        self._version = 0
        self._staged: _Staged | None = None
        self._waiting: deque[TabularSequence] = deque()
        self._running: list[TabularSequence] = []
        self._wake, self._drained = asyncio.Event(), asyncio.Event()
        self._switching = asyncio.Lock()
        self._paused = self._draining = False
        self._generated = self._kept = self._lost = 0
        self._busy_s = 0.0

    async def open(self) -> None:
        """Make the table and start the engine; version 0 are the model's first weights."""
        if self._engine is None:
            self._reset()
            self._failure = None
            self._model = TabularModel(self._options, self._ctx)
            self._engine = asyncio.create_task(self._run(), name=f"{self._name}-engine")

    async def aclose(self) -> None:
        """Stop the engine; calls that still wait for completions get `ServiceClosedError`."""
        engine, self._engine, self._model = self._engine, None, None
        if engine is not None:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
            self._fail(ServiceClosedError(f"{self._name} was closed", service=self._name))

    def _opened(self) -> TabularModel:
        if self._model is None:
            raise ServiceClosedError(f"{self._name} is not open", service=self._name)
        if self._failure is not None:
            raise self._failure
        return self._model

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Sample all requests; they start when the first completion is asked for."""
        model = self._opened()
        for request in requests:
            check_request(request, model)
        results: asyncio.Queue[Completion | AsyncFlowError] = asyncio.Queue()
        sequences = [TabularSequence(request, results) for request in requests]
        self._waiting.extend(sequences)
        self._wake.set()
        try:
            for _ in requests:
                result = await results.get()
                if isinstance(result, AsyncFlowError):
                    raise result
                yield result
        finally:
            self._discard(set(sequences))

    def _discard(self, mine: set[TabularSequence]) -> None:
        for sequence in (*self._running, *self._waiting):
            if sequence in mine:
                self._lost += len(sequence.tokens)
        self._running = [sequence for sequence in self._running if sequence not in mine]
        self._waiting = deque(sequence for sequence in self._waiting if sequence not in mine)
        self._wake.set()

    async def stage_weights(self, source: WeightSource) -> StagedWeights:
        """Copy the buckets into a second table."""
        model, started = self._opened(), time.perf_counter()
        if source.kind != "buckets" or source.buckets is None:
            raise UnsupportedCapabilityError(
                f"{self._name} takes weights in buckets, not as a {source.kind}", service=self._name
            )
        logits, checksum = await read_weights(model, source.manifest, source.buckets)
        self._staged = _Staged(source.manifest.version, logits)
        return StagedWeights(
            version=source.manifest.version,
            checksum=checksum,
            nbytes=logits.nbytes,
            wall_s=time.perf_counter() - started,
        )

    async def commit_weights(self, version: int, mode: SwitchMode) -> None:
        """Switch between two tokens; `drain` first waits for the running sequences to end."""
        self._opened()
        if mode not in TABULAR_ROLLOUT.switch_modes:
            raise UnsupportedCapabilityError(
                f"{self._name} knows no switch mode {mode!r}; modes are {', '.join(SwitchMode)}",
                service=self._name,
            )
        async with self._switching:
            if mode is SwitchMode.DRAIN:
                await self._drain()
            model, staged = self._opened(), self._staged
            if staged is None or staged.version != version:
                held = "nothing" if staged is None else f"version {staged.version}"
                raise ServiceError(
                    f"{self._name} cannot switch to version {version}: {held} is staged",
                    service=self._name,
                )
            self._kept += sum(len(sequence.tokens) for sequence in self._running)
            if mode is SwitchMode.ABORT_RESUME:
                # Cut and started anew from their own tokens, before those that never ran.
                self._waiting.extendleft(reversed(self._running))
                self._running.clear()
            model.logits, self._version, self._staged = staged.logits, version, None
            self._wake.set()

    async def _drain(self) -> None:
        self._draining = True
        try:
            while self._running and self._engine is not None:
                self._drained.clear()
                self._wake.set()
                await self._drained.wait()
        finally:
            self._draining = False
            self._wake.set()

    async def abort(self, keys: Sequence[Key] | None = None) -> int:
        """End running and waiting requests with what they have."""
        self._opened()
        chosen = None if keys is None else set(keys)
        ended = {
            sequence
            for sequence in (*self._running, *self._waiting)
            if chosen is None or sequence.request.key in chosen
        }
        self._running = [sequence for sequence in self._running if sequence not in ended]
        self._waiting = deque(sequence for sequence in self._waiting if sequence not in ended)
        for sequence in ended:
            sequence.finish("abort")
        self._wake.set()
        return len(ended)

    async def pause(self) -> None:
        """Stop producing tokens; ticks are synchronous, so none is half done."""
        self._opened()
        self._paused = True

    async def resume(self) -> None:
        """Go on."""
        self._opened()
        self._paused = False
        self._wake.set()

    async def read_weights(self, tensors: Sequence[TensorSpec]) -> AsyncIterator[Bucket]:
        """What serves, a tensor a bucket, not copied."""
        model = self._opened()
        wanted = {spec.name for spec in tensors}
        check_tensors(tensors, [spec for spec in model.specs() if spec.name in wanted])
        serving = model.tensors()
        for spec in tensors:
            data = serving[spec.name].reshape(-1).view(np.uint8)
            yield Bucket((replace(spec, offset=0),), data)

    async def stats(self) -> RolloutStats:
        """Load and work."""
        self._opened()
        return RolloutStats(
            version=self._version,
            running=len(self._running),
            waiting=len(self._waiting),
            tokens_generated=self._generated,
            busy_s=self._busy_s,
            tokens_kept=self._kept,
            tokens_lost=self._lost,
        )

    async def _run(self) -> None:
        """The engine: wait for work, fill the slots, decode a token for all, again."""
        try:
            while True:
                self._admit()
                if not self._running:
                    self._drained.set()
                if self._paused or not self._running:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                started = time.perf_counter()
                self._tick(self._opened())
                self._busy_s += time.perf_counter() - started + self._options.token_s
                await asyncio.sleep(self._options.token_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self._failure = EngineError(f"{self._name} failed: {error}", service=self._name)
            self._failure.__cause__ = error
            self._fail(self._failure)

    def _admit(self) -> None:
        while (
            self._waiting
            and len(self._running) < self._options.slots
            and not (self._paused or self._draining)
        ):
            sequence = self._waiting.popleft()
            if not self._finished(sequence):
                self._running.append(sequence)

    def _tick(self, model: TabularModel) -> None:
        contexts = [
            model.context(
                int(s.request.prompt_ids[-1]),
                len(s.tokens),
                s.tokens[-1] if s.tokens else int(s.request.prompt_ids[-1]),
            )
            for s in self._running
        ]
        tokens, logprobs = draw_tokens(
            model.rows[contexts],
            [s.request.sampling for s in self._running],
            [uniform(s.request.seed, len(s.tokens)) for s in self._running],
        )
        for sequence, token, logprob in zip(self._running, tokens, logprobs, strict=True):
            sequence.append(int(token), float(logprob), self._version)
        self._generated += len(self._running)
        self._running = [s for s in self._running if not self._finished(s)]

    def _finished(self, sequence: TabularSequence) -> bool:
        sampling, tokens = sequence.request.sampling, sequence.tokens
        if tokens and (tokens[-1] in self._ends or tokens[-1] in sampling.stop_token_ids):
            sequence.finish("stop")
        elif len(tokens) >= sampling.max_new_tokens:
            sequence.finish("length")
        else:
            return False
        return True

    def _fail(self, error: AsyncFlowError) -> None:
        for sequence in (*self._running, *self._waiting):
            sequence.results.put_nowait(error)
        self._running, self._waiting = [], deque()
        self._drained.set()
