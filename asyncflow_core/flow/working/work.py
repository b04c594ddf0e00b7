"""What workers do with leased rows: generate, or hand them to an observer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence

from asyncflow_core.batch import Batch, Key
from asyncflow_core.errors import (
    DataError,
    InvariantError,
)
from asyncflow_core.flow.working.costs import Costs, Running
from asyncflow_core.flow.working.worker import Part, Work
from asyncflow_core.services.data_store import Lease, RowInfo
from asyncflow_core.services.rollout import (
    Completion,
    GenerateRequest,
    Rollout,
    SamplingParams,
    completions_to_batch,
)

__all__ = [
    "ROLLOUT_WRITES",
    "observer_work",
    "rollout_work",
    "sampling_seed",
]

_log = logging.getLogger(__name__)

ROLLOUT_WRITES = (
    "response_ids",
    "behaviour_logprobs",
    "loss_mask",
    "versions",
    "finish_reason",
    "sampling",
)
"""Columns every rollout writes."""

_LOGPROB_AT_MOST = 0.1
"""A log-prob above 0 by as much is an engine's rounding."""


def sampling_seed(run_seed: int, key: Key) -> int:
    """Seed of one trajectory, 63 bits: equal in every process and life of a run."""
    digest = hashlib.blake2b(key.pack(), digest_size=8, key=run_seed.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little") >> 1


def rollout_work(
    service: Rollout,
    sampling: SamplingParams,
    seed: int,
    finished: Callable[[Sequence[Completion]], None] = lambda ended: None,
    costs: Costs | None = None,
) -> Work:
    """Generate the leased prompts; what ended is committed together, at once.

    A prompt that the engine refuses is dropped with its reason; it would be refused again. Each
    request has one answer: an engine that gives fewer, more or others ends the work. `finished` is
    told which responses ended; what each took until it was committed is added to `costs`.
    """
    running = Running(costs or Costs())

    async def work(lease: Lease, batch: Batch) -> AsyncGenerator[Part, None]:
        rows = {info.key: info for info in lease.rows}
        requests = [
            GenerateRequest(key, ids, sampling, sampling_seed(seed, key))
            for key, ids in zip(rows, batch["prompt_ids"], strict=True)
        ]
        running.begin(rows, time.monotonic())
        try:
            async with contextlib.aclosing(_all_ready(service, requests)) as lists:
                async for ended in lists:
                    for part in _parts(ended, rows, sampling):
                        yield part
                    _count(running, ended)  # now that they are committed, and make room
                    finished([item for item in ended if isinstance(item, Completion)])
        finally:
            running.stop(rows, time.monotonic())
        if rows:
            raise InvariantError(
                f"the rollout left {len(rows)} of {len(requests)} requests without a completion, "
                f"the first is {next(iter(rows))}; generate() yields one for each"
            )

    return work


def _count(running: Running, ended: Sequence[Completion | tuple[Key, str]]) -> None:
    now = time.monotonic()
    for item in ended:
        if isinstance(item, Completion):
            running.end(item.key, now, tokens=len(item.response_ids))
        else:
            running.stop([item[0]], now)


def _parts(
    ended: Sequence[Completion | tuple[Key, str]],
    rows: dict[Key, RowInfo],
    sampling: SamplingParams,
) -> Iterator[Part]:
    """Parts of what ended; takes its rows out of `rows`."""
    refused: dict[str, list[RowInfo]] = {}
    for item in ended:
        if isinstance(item, tuple):
            refused.setdefault(item[1], []).append(rows.pop(item[0]))
    for reason, found in refused.items():
        yield Part(found, drop=reason)
    completions = [item for item in ended if isinstance(item, Completion)]
    if completions:
        found = []
        for completion in completions:
            if completion.key not in rows:
                raise InvariantError(
                    f"the rollout completed row {completion.key}, which is not among its requests "
                    f"or was completed before"
                )
            found.append(rows.pop(completion.key))
        yield from _versioned(found, _as_asked(completions, sampling))


def _versioned(rows: Sequence[RowInfo], batch: Batch) -> Iterator[Part]:
    """Rows by the newest version among their tokens: a store tells by it which are void."""
    newest = [int(runs[:, 0].max()) if len(runs) else None for runs in batch["versions"]]
    for version in dict.fromkeys(newest):
        chosen = [at for at, found in enumerate(newest) if found == version]
        part = batch if len(chosen) == batch.rows else batch.take(chosen)
        yield Part([rows[at] for at in chosen], part, version)


def _as_asked(completions: Sequence[Completion], sampling: SamplingParams) -> Batch:
    """As columns; what the store cannot know is checked here: whether it is what was asked for."""
    try:
        batch = completions_to_batch(completions, sampling)
    except (AttributeError, TypeError, ValueError) as error:  # DataError is a ValueError
        if len(completions) > 1:  # which one was it?
            for completion in completions:
                _as_asked([completion], sampling)
        key = completions[0].key
        raise DataError(f"the rollout's completion of row {key} is malformed: {error}") from error
    for completion, tokens in zip(completions, batch["response_ids"].lengths, strict=True):
        if tokens > sampling.max_new_tokens:
            raise DataError(
                f"the rollout's completion of row {completion.key} has {tokens} tokens, allowed: "
                f"at most max_new_tokens {sampling.max_new_tokens}"
            )
    if (batch["behaviour_logprobs"].array > _LOGPROB_AT_MOST).any():
        key, highest = max(
            ((c.key, max(c.behaviour_logprobs, default=0.0)) for c in completions),
            key=lambda found: found[1],
        )
        raise DataError(
            f"the rollout's completion of row {key} has a log-prob of {highest:g}; the logarithm "
            f"of a probability is at most 0"
        )
    return batch


async def _all_ready(
    service: Rollout, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[list[Completion | tuple[Key, str]], None]:
    """Completions in lists: all that ended while the last list was being dealt with."""
    ready: asyncio.Queue[Completion | tuple[Key, str] | None] = asyncio.Queue()
    pump = asyncio.create_task(_pump(service, requests, ready))
    try:
        ended = False
        while not ended:
            items = [await ready.get()]
            while not ready.empty():
                items.append(ready.get_nowait())
            ended = None in items
            found = [item for item in items if item is not None]
            if found:
                yield found
        await pump
    finally:
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)


async def _pump(
    service: Rollout,
    requests: Sequence[GenerateRequest],
    ready: asyncio.Queue[Completion | tuple[Key, str] | None],
) -> None:
    try:
        await _generate(service, requests, ready)
    finally:
        ready.put_nowait(None)


async def _generate(
    service: Rollout,
    requests: Sequence[GenerateRequest],
    ready: asyncio.Queue[Completion | tuple[Key, str] | None],
) -> None:
    answered = False
    try:
        async for completion in service.generate(requests):
            if not isinstance(completion, Completion):
                raise InvariantError(
                    f"the rollout yielded a {type(completion).__name__}, not a Completion"
                )
            answered = True
            ready.put_nowait(completion)
    except DataError as error:
        if answered:
            raise InvariantError(
                f"the rollout refused a request when it had answered others: {error}"
            ) from error
        if len(requests) == 1:
            ready.put_nowait((requests[0].key, f"refused by the engine: {error}"))
            return
        # None was started: each by itself, so that only the prompts at fault are lost.
        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(_generate(service, [request], ready))


def observer_work(observe: Callable[[Sequence[RowInfo], Batch], Awaitable[None]]) -> Work:
    """Hand rows to a coroutine function and acknowledge them."""

    async def work(lease: Lease, batch: Batch) -> AsyncGenerator[Part, None]:
        await observe(lease.rows, batch)
        yield Part(lease.rows)

    return work
