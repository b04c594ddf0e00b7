"""The requests of a rollout: each is on one server at a time, or waits for one by name."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from asyncflow_core.errors import (
    AsyncFlowError,
    DataError,
    EngineError,
    PeerLostError,
    ServiceTimeoutError,
)
from asyncflow_core.services.rollout import Completion
from asyncflow_sglang.http import RefusedError
from asyncflow_sglang.options import SGLangOptions
from asyncflow_sglang.replies import Finish, Labels, Segment
from asyncflow_sglang.routing import Placement, Routing
from asyncflow_sglang.server import Server
from asyncflow_sglang.trajectory import Trajectory

__all__ = ["Dispatch"]

_log = logging.getLogger(__name__)
_SAY_S = 30.0
"""Time between two warnings about requests that no server takes."""
_TRIES = 30
"""Attempts at one request, one after another, that may yield nothing."""
_PAUSE_S = 3.0
"""Longest pause between two of them."""


class Dispatch:
    """Brings requests to servers, and on to others, until they end.

    Args:
        name: of the rollout.
        options: of the rollout.
        labels: names of its versions.
        servers: by name; may grow and shrink.

    Attributes:
        kept: tokens that lived through a switch, counted at each.
        lost: tokens thrown away, since other weights than this rollout's made them.
    """

    def __init__(
        self, name: str, options: SGLangOptions, labels: Labels, servers: Mapping[str, Server]
    ) -> None:
        self.kept = self.lost = 0
        self._name = name
        self._options = options
        self._labels = labels
        self._servers = servers
        self._routing = Routing(options.slots, options.affinity_slack)
        self._places: dict[Trajectory, asyncio.Future[str | None]] = {}

    @property
    def waiting(self) -> int:
        """Requests that are on no server."""
        return self._routing.waiting

    def add(self, server: str) -> None:
        """A server, which takes none until it changes."""
        self._routing.add(server)

    def changed(self, server: Server) -> None:
        """It may take requests, or may no longer."""
        if server.ready:
            self._deal(self._routing.open(server.name))
        else:
            self._routing.close(server.name)

    def withdraw(self, trajectories: Iterable[Trajectory]) -> None:
        """They are to end with what they have; those that wait end now."""
        for trajectory in trajectories:
            trajectory.aborted = True
            future = self._places.get(trajectory)
            if future is not None and not future.done():
                future.set_result(None)
                self._deal(self._routing.done(trajectory))

    async def run(self, trajectory: Trajectory) -> Completion:
        """From server to server until it ends.

        Raises:
            DataError: a server will not take it as it is.
            EngineError: the servers failed it.
            PeerLostError: no server is left.
            ServiceTimeoutError: no server could take it in `wait_s`.
        """
        futile, since = 0, 0.0  # attempts in a row without a token, and when the first ended
        while not trajectory.aborted:
            asked = time.monotonic()
            name = await self._place(trajectory)
            since += time.monotonic() - asked  # that wait has a limit of its own
            if name is None or trajectory.aborted:  # it may be withdrawn right after it got a place
                self._deal(self._routing.done(trajectory))
                break
            try:
                segment = await self._servers[name].serve(trajectory)
            except RefusedError as error:
                raise self._refused(trajectory, error, name) from error
            finally:
                self._deal(self._routing.done(trajectory))
            self._take(trajectory, segment, self._servers.get(name))
            finish = segment.finish
            if finish is not None and finish.kind != "abort":
                return self._completed(trajectory, finish.kind)
            if not trajectory.left:  # it was cut at its very end
                return self._completed(trajectory, "length")
            if finish is not None and finish.status:
                self._ended_by_itself(trajectory, finish, name)
            if segment.ids:
                futile = 0
                continue
            futile += 1
            since = time.monotonic() if futile == 1 else since
            self._check_patience(trajectory, segment, name, tries=futile, since=since)
            await asyncio.sleep(min(0.1 * futile, _PAUSE_S))
        return self._completed(trajectory, "abort")

    def _completed(self, trajectory: Trajectory, reason: str) -> Completion:
        self.kept += trajectory.kept
        return trajectory.completion(reason)

    def _take(self, trajectory: Trajectory, segment: Segment, server: Server | None) -> None:
        """Add what a server made, if all of it came from weights of this rollout.

        Else the segment is left as one that yielded nothing.
        """
        runs = [(self._labels.version(label), count) for label, count in segment.spans]
        known = [(version, count) for version, count in runs if version is not None]
        if len(known) == len(runs):
            trajectory.extend(segment.ids, segment.logprobs, known)
            return
        spans, self.lost = segment.spans, self.lost + len(segment.ids)
        segment.ids, segment.logprobs, segment.spans = [], [], []
        segment.finish = None
        segment.broke = f"tokens of weights that are not this rollout's: {spans}"
        if server is not None:
            server.foreign(spans)

    def _refused(self, trajectory: Trajectory, error: RefusedError, name: str) -> AsyncFlowError:
        message = f"request {trajectory.request.key}: {name} refuses it: {error}"
        if error.status == 400:
            return DataError(message)
        return EngineError(message, service=self._name)

    def _ended_by_itself(self, trajectory: Trajectory, finish: Finish, name: str) -> None:
        """The server ended it of its own accord: it is full, or out of memory, or will not."""
        message = (
            f"request {trajectory.request.key}: {name} ended it with status {finish.status}: "
            f"{finish.message}"
        )
        if finish.status == 400:
            raise DataError(message)
        _log.warning("%s; it is tried again", message)

    def _check_patience(
        self, trajectory: Trajectory, segment: Segment, name: str, *, tries: int, since: float
    ) -> None:
        """Raise for a request that got nothing, too often or for too long."""
        waited = time.monotonic() - since
        # A router that is away is waited for like a server.
        away = self._options.router is not None and segment.unreachable
        if waited <= self._options.wait_s and (away or tries <= _TRIES):
            return
        finish = segment.finish
        last = f"{finish.status} {finish.message}" if finish is not None else segment.broke
        line = self._servers[name].line if name in self._servers else name
        message = (
            f"request {trajectory.request.key} got no token in {tries} attempts over {waited:.0f} "
            f"s; the last ended with {last.strip() or 'the loss of the server'!r}; {line}"
        )
        if away:
            raise ServiceTimeoutError(
                f"{message}; is the router {self._options.router} up? the limit is wait_s "
                f"{self._options.wait_s:g}",
                service=self._name,
            )
        raise EngineError(message, service=self._name)

    async def _place(self, trajectory: Trajectory) -> str | None:
        """The server it goes to; None if it was aborted while it waited."""
        future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._places[trajectory] = future
        prefix = trajectory.request.prompt_ids.tobytes()
        self._deal(self._routing.submit(trajectory, prefix))
        start = said = time.monotonic()
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=1.0)
                now = time.monotonic()
                if future.done() or self._hope:
                    start = now
                    continue
                self._check_hope(trajectory, now - start)
                if now - said >= _SAY_S:
                    said = now
                    _log.warning("%s", self._waits_for(now - start))
            return future.result()
        except BaseException:
            self._deal(self._routing.done(trajectory))
            raise
        finally:
            del self._places[trajectory]

    @property
    def _hope(self) -> bool:
        """Whether a server takes requests, full or not, or does not since it was told so."""
        servers = self._servers.values()
        told = (server.usable and (server.paused or server.switching) for server in servers)
        return self._routing.any_open or any(told)

    def _check_hope(self, trajectory: Trajectory, waited: float) -> None:
        """Raise if no server will come, or none came for too long."""
        if self._servers and all(server.gone for server in self._servers.values()):
            raise PeerLostError(
                f"{self._name} has no server left: {self._lines()}", service=self._name
            )
        if waited > self._options.wait_s:
            raise ServiceTimeoutError(
                f"request {trajectory.request.key}: {self._waits_for(waited)}; the limit is wait_s "
                f"{self._options.wait_s:g}",
                service=self._name,
            )

    def _waits_for(self, waited: float) -> str:
        return (
            f"{self._routing.waiting} requests of {self._name} wait since {waited:.0f} s for a "
            f"server: {self._lines()}"
        )

    def _lines(self) -> str:
        return "; ".join(server.line for server in self._servers.values())

    def _deal(self, placements: Sequence[Placement]) -> None:
        for trajectory, server in placements:
            future = self._places.get(trajectory)  # type: ignore[call-overload]
            if future is not None and not future.done():
                future.set_result(server)
