"""The `transformers` rollout as a service."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from asyncflow_core.batch import Key
from asyncflow_core.errors import (
    AsyncFlowError,
    DataError,
    EngineError,
    ServiceClosedError,
    ServiceError,
)
from asyncflow_core.parts import PartContext, Tokenizer
from asyncflow_core.services.rollout import (
    Completion,
    GenerateRequest,
    Rollout,
    RolloutStats,
    StagedWeights,
    SwitchMode,
)
from asyncflow_core.services.weight_sync import Bucket, TensorSpec, WeightSource
from asyncflow_transformers.loading import load_model, make_engine
from asyncflow_transformers.loop import EngineLoop
from asyncflow_transformers.options import RolloutOptions, TokenizerOptions, check_tokenizer
from asyncflow_transformers.requests import check_request
from asyncflow_transformers.serving import Outbox, ServedEngine, Ticket
from asyncflow_transformers.sources import from_broadcast, from_files
from asyncflow_transformers.stops import StopStrings
from asyncflow_transformers.tokenizer import HuggingFaceTokenizer
from asyncflow_transformers.weights import DoubleBuffer

__all__ = ["TransformersRollout"]

T = TypeVar("T")


class TransformersRollout(Rollout):
    """Generates with a transformers model in this process.

    It owns two sets of the model's weights (the second from the first `stage_weights` on) and a
    key-value cache of `slots` x `max_length` tokens. The engine runs on one thread, weights are
    taken in on another while it does, and a switch exchanges pointers between two tokens:

    - drain: running sequences end first, waiting ones start under the new weights;
    - in flight: sequences go on over the keys and values that the old weights computed;
    - abort and resume: these are computed anew, so that later log-probs are exactly those of the
      new weights.

    Concurrency: `generate` calls may overlap; staging and committing wait for each other.
    """

    def __init__(self, options: RolloutOptions, context: PartContext) -> None:
        """Keep the arguments. Stop strings are decoded by the run's tokenizer, else the model's."""
        self._options = options
        self._name = context.name or "rollout"
        self._tokenizer: Tokenizer | None = context.tokenizer
        self._loop: EngineLoop | None = None
        self._helper: ThreadPoolExecutor | None = None
        self._buffer: DoubleBuffer
        self._staged: int | None = None
        self._update = asyncio.Lock()
        self._in_doubt = False  # whether a commit that did not return has happened

    async def open(self) -> None:
        """Load the model and start its thread."""
        self._helper = ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-weights")
        self._loop = EngineLoop(self._build, slots=self._options.slots, name=self._name)
        await self._loop.start()

    def _build(self) -> ServedEngine:
        model = load_model(self._options)
        own = TokenizerOptions(model=self._options.model)
        if self._tokenizer is None and not list(check_tokenizer(own)):
            self._tokenizer = HuggingFaceTokenizer(own)
        self._buffer = DoubleBuffer(model)
        ends = () if self._tokenizer is None else self._tokenizer.eos_token_ids
        return make_engine(model, self._options, ends=ends)

    async def aclose(self) -> None:
        """End the threads; calls still waiting raise `ServiceClosedError`."""
        loop, helper = self._loop, self._helper
        self._loop = self._helper = None
        if loop is not None:
            await loop.stop()
        if helper is not None:
            await asyncio.to_thread(helper.shutdown)

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Sample; see `Rollout.generate`.

        Raises:
            DataError: a request the engine cannot take, named by its key; none is started.
            EngineError: the engine failed, now or in an earlier call.
        """
        loop = self._opened()
        outbox: Outbox = asyncio.Queue()
        tickets = [self._ticket(loop.engine, request, outbox) for request in requests]
        loop.submit(tickets)
        pending = set(tickets)
        try:
            while pending:
                ticket, result = await outbox.get()
                if isinstance(result, AsyncFlowError):
                    raise result
                pending.discard(ticket)
                yield result
        finally:
            if pending:
                loop.forget(pending)

    def _ticket(self, engine: ServedEngine, request: GenerateRequest, outbox: Outbox) -> Ticket:
        stops = None
        if request.sampling.stop:
            if self._tokenizer is None:
                raise DataError(
                    f"request {request.key}: stop strings {request.sampling.stop} need a "
                    f"tokenizer, and {self._options.model} has none; use stop_token_ids"
                )
            decode = getattr(self._tokenizer, "decode_all", self._tokenizer.decode)
            stops = StopStrings(request.sampling.stop, decode)
        ticket = Ticket.of(request, outbox, stops)
        try:
            check_request(
                ticket.request, max_length=engine.max_length, vocab_size=engine.vocab_size
            )
        except ValueError as error:
            raise DataError(str(error)) from error
        return ticket

    async def stage_weights(self, source: WeightSource) -> StagedWeights:
        """Copy a version into the second set of weights, while generating.

        Raises:
            DataError: the tensors are not the model's (what was staged before stays), or the
                source fell short (nothing is staged then).
        """
        loop = self._opened()
        # Closed at once if staging fails: a source may hold a version that others wait to replace.
        async with self._update, contextlib.aclosing(self._buckets(source)) as buckets:
            start = time.perf_counter()
            await loop.settled()
            await self._help(lambda: self._buffer.begin(source.manifest.tensors))
            self._staged = None
            async for bucket in buckets:
                await self._help(lambda bucket=bucket: self._buffer.add(bucket))  # type: ignore[misc]
            checksum, nbytes = await self._help(self._buffer.finish)
            version = self._staged = source.manifest.version
            return StagedWeights(version, checksum, nbytes, time.perf_counter() - start)

    async def _buckets(self, source: WeightSource) -> AsyncGenerator[Bucket, None]:
        """Whatever the source is, its buckets."""
        tensors = source.manifest.tensors
        if source.kind == "buckets" and source.buckets is not None:
            try:
                async for bucket in source.buckets:
                    yield bucket
            finally:
                if isinstance(source.buckets, AsyncGenerator):
                    await source.buckets.aclose()
            return
        found = (
            from_files(source.path, tensors)
            if source.path is not None
            else from_broadcast(source.collective or {}, tensors)
        )
        while True:
            more = await self._help(lambda: next(found, None))
            if more is None:
                return
            yield more

    async def read_weights(self, tensors: Sequence[TensorSpec]) -> AsyncIterator[Bucket]:
        """These tensors as they serve, a bucket each."""
        self._opened()
        for spec in tensors:
            async with self._update:
                found = await self._help(lambda spec=spec: self._buffer.serving(spec))  # type: ignore[misc]
            yield found

    async def commit_weights(self, version: int, mode: SwitchMode) -> None:
        """Let the staged version serve; see `Rollout.commit_weights` and the class."""
        loop, mode = self._opened(), SwitchMode(mode)
        async with self._update:
            if self._in_doubt:
                # A cancelled commit may still be to come: a second exchange of pointers would let
                # the old weights serve under the new version's name.
                await loop.settled()
            # Nothing is awaited up to the commit itself: requests of the next moment wait for it.
            if self._staged != version:
                raise ServiceError(
                    f"{self._name} cannot commit version {version}: staged is {self._staged}",
                    service=self._name,
                )
            self._in_doubt = True
            if mode is SwitchMode.DRAIN:
                await loop.swap_drained(self._swap, version)
            else:
                resume = mode is SwitchMode.ABORT_RESUME
                await loop.swap_now(self._swap, version, recompute=resume)
            self._in_doubt = False

    def _swap(self) -> None:
        """Runs on the engine's thread: a cancelled commit leaves no doubt what is staged."""
        self._staged = None
        self._buffer.swap()

    async def abort(self, keys: Sequence[Key] | None = None) -> int:
        """End requests, running or waiting, with what they have."""
        return await self._opened().abort(None if keys is None else frozenset(keys))

    async def pause(self) -> None:
        """Stop producing tokens at the next token boundary; everything is kept."""
        await self._opened().pause(True)

    async def resume(self) -> None:
        """Go on."""
        await self._opened().pause(False)

    async def stats(self) -> RolloutStats:
        """Load and work."""
        return self._opened().stats

    def _opened(self) -> EngineLoop:
        if self._loop is None:
            raise ServiceClosedError(f"{self._name} is not open", service=self._name)
        return self._loop

    async def _help(self, work: Callable[[], T]) -> T:
        """Run beside the engine; its own exceptions cross here."""

        def crossing() -> T:
            try:
                return work()
            except AsyncFlowError:
                raise
            except Exception as error:
                raise EngineError(
                    f"{self._name} cannot take weights in: {type(error).__name__}: {error}",
                    service=self._name,
                ) from error

        if self._helper is None:
            raise ServiceClosedError(f"{self._name} is not open", service=self._name)
        return await asyncio.get_running_loop().run_in_executor(self._helper, crossing)
