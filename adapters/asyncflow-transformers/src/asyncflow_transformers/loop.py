"""The thread that owns the engine: takes requests and commands between two tokens.

Everything that touches the engine or the weights that serve runs here. What asyncio must know goes
back in one `call_soon_threadsafe` a step.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from asyncflow_core.batch import Key
from asyncflow_core.errors import AsyncFlowError, EngineError, ServiceClosedError
from asyncflow_core.services.rollout import Completion, RolloutStats

from asyncflow_transformers.engine import GenerationEngine
from asyncflow_transformers.requests import EngineCompletion, EngineRequest, unstarted
from asyncflow_transformers.stops import StopStrings

__all__ = ["EngineLoop", "Ticket"]

Outbox = asyncio.Queue["Completion | AsyncFlowError"]


@dataclass(slots=True, eq=False)
class Ticket:
    """One request on its way through the engine, which knows it by this object, not by its key:
    the same row may run twice after its lease was lost.
    """

    key: Key
    outbox: Outbox
    stops: StopStrings | None = None
    request: EngineRequest | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        """The key, as the engine's errors name it."""
        return str(self.key)

    def close(self, result: EngineCompletion) -> Completion:
        """The engine's result as the service's."""
        return Completion(
            self.key,
            result.response_ids,
            result.logprobs,
            result.versions,
            result.finish_reason,
        )


@dataclass(slots=True)
class _Switch:
    """A change of weights that waits for running sequences to end."""

    swap: Callable[[], None]
    version: int
    done: asyncio.Future[None]


class EngineLoop:
    """Runs an engine on its own thread.

    Concurrency: methods without a leading underscore are called on the event loop's thread.
    """

    def __init__(self, build: Callable[[], GenerationEngine], *, slots: int, name: str) -> None:
        """Keep the arguments; `build` makes the engine, on the thread."""
        self.stats = RolloutStats()
        self.failure: AsyncFlowError | None = None
        self._build = build
        self._slots = slots
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._asyncio = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._asyncio.create_future()
        self._waiting: deque[Ticket] = deque()
        self._live: set[Ticket] = set()
        self._switch: _Switch | None = None
        self._paused = False
        self._open = True
        self._news: list[tuple[Ticket, Completion | AsyncFlowError]] = []
        self._replies: list[tuple[asyncio.Future[Any], Any]] = []

    async def start(self) -> None:
        """Build the engine; raises what building raised."""
        self._thread.start()
        await self._ready

    async def stop(self) -> None:
        """End the thread; what still ran gets `ServiceClosedError`."""
        if self._thread.is_alive():
            self._inbox.put(self._end)
            await asyncio.to_thread(self._thread.join)

    def submit(self, tickets: Collection[Ticket]) -> None:
        """Queue checked requests."""
        self._inbox.put(lambda: self._submit(tickets))

    def forget(self, tickets: Collection[Ticket]) -> None:
        """Throw requests away that nobody waits for any more."""
        self._inbox.put(lambda: self._forget(tickets))

    async def abort(self, keys: frozenset[Key] | None) -> int:
        """End requests with what they have; returns how many."""
        count: int = await self._ask(lambda: self._abort(keys))
        return count

    async def pause(self, paused: bool) -> None:
        """Stop before the next token, or go on."""
        await self._ask(lambda: setattr(self, "_paused", paused))

    async def swap_now(self, swap: Callable[[], None], version: int, *, recompute: bool) -> None:
        """Change weights before the next token; `recompute` rebuilds the caches under them."""
        await self._ask(lambda: self._swap(swap, version, recompute=recompute))

    async def swap_drained(self, swap: Callable[[], None], version: int) -> None:
        """Change weights when all running sequences have ended; waiting ones start afterwards.

        Cancelled before that, it never happens.
        """
        done: asyncio.Future[None] = self._asyncio.create_future()
        await self._ask(lambda: setattr(self, "_switch", _Switch(swap, version, done)))
        try:
            await done
        except asyncio.CancelledError:
            await self._ask(lambda: setattr(self, "_switch", None))
            raise

    async def _ask(self, work: Callable[[], Any]) -> Any:
        """Run between two tokens and give back the result."""
        if self.failure is not None:
            raise self.failure
        reply: asyncio.Future[Any] = self._asyncio.create_future()

        def answer() -> None:
            self._replies.append((reply, work()))

        self._pending_replies_add(reply)
        self._inbox.put(answer)
        return await reply
