"""The thread that owns the engine: takes requests and commands between two tokens.

Everything that touches the engine or the weights that serve runs there. Results go back to asyncio
in one `call_soon_threadsafe` a step.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, cast

from asyncflow_core.batch import Key
from asyncflow_core.errors import AsyncFlowError, EngineError, ServiceClosedError
from asyncflow_core.services.rollout import Completion, RolloutStats
from asyncflow_transformers.requests import EngineCompletion, unstarted
from asyncflow_transformers.serving import ServedEngine, Ticket

__all__ = ["EngineLoop"]


@dataclass(slots=True)
class _Switch:
    """A change of weights that waits until nothing runs."""

    swap: Callable[[], None]
    version: int
    done: asyncio.Future[None]


class EngineLoop:
    """Runs an engine on its own thread.

    An exception of the engine ends the thread and fails every call, waiting or later, with
    `EngineError`.

    Concurrency: public methods are for the event loop's thread; `_on_*` and what they use run on
    the engine's.
    """

    def __init__(self, build: Callable[[], ServedEngine], *, slots: int, name: str) -> None:
        """Keep the arguments; `build` makes the engine, on its thread."""
        self.stats = RolloutStats()
        self.failure: AsyncFlowError | None = None
        self.engine: ServedEngine
        self._build = build
        self._slots = slots
        self._name = name
        self._asyncio = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._on_start, name=name, daemon=True)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Of the event loop's thread: who is owed an answer.
        self._tickets: set[Ticket] = set()
        self._futures: set[asyncio.Future[Any]] = set()
        # Of the engine's thread.
        self._waiting: deque[Ticket] = deque()
        self._running: set[Ticket] = set()
        self._switch: _Switch | None = None
        self._paused = False
        self._ended = False
        self._news: list[tuple[Ticket, Completion]] = []
        self._replies: list[tuple[asyncio.Future[Any], Any]] = []
        self._tokens = self._kept = self._lost = 0
        self._busy_s = 0.0

    async def start(self) -> None:
        """Build the engine; raises what building raised."""
        ready = self._future()
        self._inbox.put(lambda: self._replies.append((ready, None)))
        self._thread.start()
        await ready

    async def stop(self) -> None:
        """End the thread; what was still waiting gets `ServiceClosedError`."""
        self._inbox.put(lambda: setattr(self, "_ended", True))
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def submit(self, tickets: Collection[Ticket]) -> None:
        """Queue checked requests; their outboxes get a completion each."""
        if self.failure is not None:
            raise self.failure
        self._tickets.update(tickets)
        self._inbox.put(lambda: self._waiting.extend(tickets))

    def forget(self, tickets: Collection[Ticket]) -> None:
        """Throw requests away that nobody waits for any more."""
        self._tickets.difference_update(tickets)
        self._inbox.put(lambda: self._on_forget(frozenset(tickets)))

    async def abort(self, keys: frozenset[Key] | None) -> int:
        """End requests with what they have; returns how many."""
        return cast("int", await self._ask(lambda: self._on_abort(keys)))

    async def pause(self, paused: bool) -> None:
        """Stop before the next token, or go on."""
        await self._ask(lambda: setattr(self, "_paused", paused))

    async def swap_now(self, swap: Callable[[], None], version: int, *, recompute: bool) -> None:
        """Change weights before the next token; `recompute` rebuilds the caches under them."""
        await self._ask(lambda: self._on_swap(swap, version, recompute=recompute))

    async def swap_drained(self, swap: Callable[[], None], version: int) -> None:
        """Change weights when nothing runs; waiting requests start afterwards.

        Cancelled before that, it does not happen.
        """
        if self.failure is not None:
            raise self.failure
        done = self._future()
        self._inbox.put(lambda: setattr(self, "_switch", _Switch(swap, version, done)))
        try:
            await done
        finally:
            self._inbox.put(lambda: setattr(self, "_switch", None))

    async def settled(self) -> None:
        """Return when no change of weights is under way, not even one that was cancelled."""
        await self._ask(lambda: None)

    async def _ask(self, work: Callable[[], Any]) -> Any:
        if self.failure is not None:
            raise self.failure
        reply = self._future()
        self._inbox.put(lambda: self._replies.append((reply, work())))
        return await reply

    def _future(self) -> asyncio.Future[Any]:
        future = self._asyncio.create_future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def _deliver(
        self,
        news: list[tuple[Ticket, Completion]],
        replies: list[tuple[asyncio.Future[Any], Any]],
    ) -> None:
        for ticket, completion in news:
            if ticket in self._tickets:
                self._tickets.discard(ticket)
                ticket.outbox.put_nowait((ticket, completion))
        for future, value in replies:
            if not future.done():
                future.set_result(value)

    def _fail(self, error: AsyncFlowError) -> None:
        self.failure = error
        for ticket in self._tickets:
            ticket.outbox.put_nowait((ticket, error))
        self._tickets.clear()
        for future in list(self._futures):
            if not future.done():
                future.set_exception(error)

    def _on_start(self) -> None:
        error: AsyncFlowError = ServiceClosedError(f"{self._name} was closed", service=self._name)
        try:
            self.engine = self._build()
            while not self._ended:
                self._on_listen()
                # Answers do not wait for a token, nor for one that fails.
                self._on_report()
                self._on_work()
                self._on_report()
        except AsyncFlowError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 - an engine may raise anything; it crosses here
            error = EngineError(
                f"{self._name} failed: {type(raised).__name__}: {raised}", service=self._name
            )
            error.__cause__ = raised
        self._on_post(self._fail, error)

    def _on_listen(self) -> None:
        """Take what came in; wait for something where there is nothing to do."""
        engine = self.engine
        steps = not self._paused and (engine.has_work or (self._waiting and not self._switch))
        if not steps and not (self._switch and not engine.has_work):
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()
        if self._switch is not None and not engine.has_work:
            switch, self._switch = self._switch, None
            self._on_swap(switch.swap, switch.version, recompute=False)
            self._replies.append((switch.done, None))

    def _on_work(self) -> None:
        engine = self.engine
        if self._paused or self._ended:
            return
        while self._waiting and self._switch is None and len(self._running) < self._slots:
            ticket = self._waiting.popleft()
            engine.submit(ticket.request)
            self._running.add(ticket)
        if not engine.has_work:
            return
        start = time.perf_counter()
        ended = engine.step()
        self._tokens += engine.num_running + len(ended)
        self._on_ended(ended)
        self._on_stop_strings()
        self._busy_s += time.perf_counter() - start

    def _on_ended(self, results: list[EngineCompletion], reason: str | None = None) -> None:
        for result in results:
            ticket = cast("Ticket", result.key)
            self._running.discard(ticket)
            stops, why = ticket.stops, reason
            if why is None and stops is not None and stops.reached(result.response_ids):
                why = "stop"
            self._news.append((ticket, ticket.completion(result, why)))

    def _on_stop_strings(self) -> None:
        reached = [
            ticket
            for ticket in self._running
            if ticket.stops and ticket.stops.reached(self.engine.response_so_far(ticket))
        ]
        if reached:
            self._on_ended(self.engine.abort(reached), "stop")

    def _on_swap(self, swap: Callable[[], None], version: int, *, recompute: bool) -> None:
        start = time.perf_counter()
        self._kept += sum(self.engine.response_so_far(ticket).size for ticket in self._running)
        swap()
        self.engine.set_version(version)
        if recompute:
            self.engine.recompute_cache()
        self._busy_s += time.perf_counter() - start

    def _on_abort(self, keys: frozenset[Key] | None) -> int:
        def chosen(ticket: Ticket) -> bool:
            return keys is None or ticket.key in keys

        partials = [unstarted(ticket.request) for ticket in self._waiting if chosen(ticket)]
        self._waiting = deque(ticket for ticket in self._waiting if not chosen(ticket))
        partials += self.engine.abort([ticket for ticket in self._running if chosen(ticket)])
        self._on_ended(partials, "abort")
        return len(partials)

    def _on_forget(self, tickets: frozenset[Ticket]) -> None:
        self._waiting = deque(ticket for ticket in self._waiting if ticket not in tickets)
        for partial in self.engine.abort(self._running & tickets):
            ticket = cast("Ticket", partial.key)
            self._running.discard(ticket)
            prefix = ticket.request.prefix_ids
            self._lost += partial.response_ids.size - (0 if prefix is None else prefix.size)

    def _on_report(self) -> None:
        self.stats = RolloutStats(
            version=self.engine.version,
            running=len(self._running),
            waiting=len(self._waiting),
            tokens_generated=self._tokens,
            busy_s=self._busy_s,
            tokens_kept=self._kept,
            tokens_lost=self._lost,
        )
        if self._news or self._replies:
            news, replies = self._news, self._replies
            self._news, self._replies = [], []
            self._on_post(self._deliver, news, replies)

    def _on_post(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self._asyncio.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            # The event loop is closed: nobody is left to hear of it.
            self._ended = True
