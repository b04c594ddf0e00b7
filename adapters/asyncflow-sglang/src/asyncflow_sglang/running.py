"""The requests that are on one server."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from asyncflow_sglang.http import Http, RefusedError, UnreachableError
from asyncflow_sglang.replies import Segment
from asyncflow_sglang.trajectory import Trajectory

__all__ = ["Requests"]

_ABORT_S = 5.0
_HANG_UP_S = 2.0
_SETTLE_S = 0.1


@dataclass(slots=True, eq=False)
class _Running:
    """A request here.

    Attributes:
        trajectory: the whole request.
        label: of the weights the server had when it began.
        switch: how many switches there had been by then.
        segment: what the server made of it.
        certain: of its tokens, those made before the first switch after it began.
        task: reads its tokens.
        ended: set when it is off the server: an abort may go on after `task` has ended.
    """

    trajectory: Trajectory
    label: str
    switch: int
    segment: Segment = field(default_factory=Segment)
    certain: int | None = None
    task: asyncio.Task[None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Requests:
    """Streams requests from a server.

    Args:
        front: where requests go: the server, or the router before it.
        workers: where they may run, for aborts.
        interval: tokens between two reports.

    Attributes:
        tokens: made so far.
        lost: of those, thrown away, since nobody knows which weights made them.
        busy_s: seconds in which tokens came.
        last_token: when the last came, or could have begun to.
    """

    def __init__(self, front: Http, workers: Sequence[Http], *, interval: int) -> None:
        self.tokens = self.lost = 0
        self.busy_s = 0.0
        self.last_token = time.monotonic()
        self._front = front
        self._workers = workers
        self._interval = interval
        self._running: dict[str, _Running] = {}
        self._switch = 0

    def __len__(self) -> int:
        return len(self._running)

    async def serve(self, trajectory: Trajectory, label: str, *, seeds: bool) -> Segment:
        """Go on with a request here; unfinished if the server lost it.

        Args:
            trajectory: the request.
            label: of the weights that serve now.
            seeds: whether the server draws by seed.

        Raises:
            RefusedError: the server will not have it.
            EngineError: what it sent cannot be understood.
        """
        rid = uuid.uuid4().hex
        running = _Running(trajectory, label, self._switch)
        if not self._running:
            self.last_token = time.monotonic()
        self._running[rid] = running
        body = trajectory.body(rid, label, seeds=seeds, interval=self._interval)
        running.task = asyncio.create_task(self._read(body, running.segment))
        try:
            await self._follow(rid, running.task)
        finally:
            del self._running[rid]
            running.ended.set()
        if not running.task.cancelled():
            running.task.result()
        return self._certain(running)

    async def _follow(self, rid: str, task: asyncio.Task[None]) -> None:
        """To its end; who is cancelled takes the request off the server first."""
        try:
            await asyncio.wait({task})
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await self._abort(rid)

    async def _read(self, body: dict[str, object], segment: Segment) -> None:
        try:
            async with contextlib.aclosing(self._front.stream("/generate", body)) as replies:
                async for reply in replies:
                    self.tokens += segment.take(reply)
                    now = time.monotonic()
                    self.busy_s += now - self.last_token
                    self.last_token = now
                    if segment.finish is not None:
                        return
        except UnreachableError as error:
            segment.broke, segment.unreachable = str(error), error.refused
        except RefusedError as error:
            if error.status < 500 and error.status != 429:
                raise
            segment.broke = str(error)

    def _certain(self, running: _Running) -> Segment:
        """The segment; of an unfinished one, the tokens made before any switch."""
        segment = running.segment
        if segment.finish is not None:
            return segment
        count = len(segment.ids) if running.certain is None else running.certain
        self.lost += len(segment.ids) - count
        del segment.ids[count:], segment.logprobs[count:]
        segment.spans = [(running.label, count)] if count else []
        return segment

    def switched(self) -> None:
        """The server's weights change now, and it stands still: what came so far is certain."""
        self._switch += 1
        for running in self._running.values():
            if running.certain is None:
                running.certain = len(running.segment.ids)

    def doubt(self) -> None:
        """Others changed the server's weights, nobody knows when: give all back without tokens."""
        for running in self._running.values():
            running.certain = 0
        self.cut()

    def cut(self) -> None:
        """Give all back as they are."""
        for running in self._running.values():
            if running.task is not None:
                running.task.cancel()

    async def end(self, trajectories: Collection[Trajectory] | None = None) -> None:
        """Let the server end these, default all, with what they have; returns when they did."""
        chosen = {
            rid: running
            for rid, running in self._running.items()
            if trajectories is None or running.trajectory in trajectories
        }
        await asyncio.gather(*(self._abort(rid) for rid in chosen))
        while tasks := {r.task for r in chosen.values() if r.task and not r.task.done()}:
            _, left = await asyncio.wait(tasks, timeout=_HANG_UP_S)
            # An abort that overtook its request has no effect, nor has a second one: hang up.
            for task in left:
                task.cancel()
        await asyncio.gather(*(running.ended.wait() for running in chosen.values()))

    async def drained(self) -> None:
        """Until none is left."""
        while self._running:
            await asyncio.gather(*(running.ended.wait() for running in self._running.values()))

    async def settled(self) -> None:
        """Until no token came for a moment; those made before a pause are still on their way."""
        left = _SETTLE_S
        while self._running and left > 0:
            await asyncio.sleep(left)
            left = self.last_token + _SETTLE_S - time.monotonic()

    async def _abort(self, rid: str) -> None:
        await asyncio.gather(*(_abort(worker, rid) for worker in self._workers))


async def _abort(worker: Http, rid: str) -> None:
    with contextlib.suppress(RefusedError, UnreachableError):
        await worker.post("/abort_request", {"rid": rid}, timeout_s=_ABORT_S)
