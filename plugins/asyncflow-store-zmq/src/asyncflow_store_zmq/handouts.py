"""Hand-outs that wait for rows, answered in the very call that made rows ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from asyncflow_core.wire import Peer

__all__ = ["Handouts", "Later"]

Shape = Callable[[Any], Any]


class Later:
    """An answer that comes later, and is told at once when it comes.

    A future tells what it has one turn of the event loop later; by then the loop has answered who
    brought the rows, and who waits for them has waited that much longer.
    """

    __slots__ = ("_abandon", "_came", "_error", "_future", "_tell", "_value")

    def __init__(self, abandon: Callable[[], None]) -> None:
        """Nobody waits yet; `abandon` is called when who asked does not want it any more."""
        self._abandon = abandon
        self._tell: Callable[[Any, Exception | None], None] | None = None
        self._future: asyncio.Future[Any] | None = None
        self._came = False
        self._value: Any = None
        self._error: Exception | None = None

    @property
    def cancelled(self) -> bool:
        """Whether the task that waits was cancelled; it goes on in a later turn of the loop."""
        return self._future is not None and self._future.cancelled()

    def then(self, tell: Callable[[Any, Exception | None], None]) -> None:
        """Call with the answer, or with the error that came instead."""
        self._tell = tell
        if self._came:
            tell(self._value, self._error)

    def come(self, value: Any, error: Exception | None = None) -> None:
        """The answer is there."""
        self._came, self._value, self._error = True, value, error
        if self._tell is not None:
            self._tell(value, error)

    def cancel(self) -> None:
        """Who asked does not want it any more, though it may have come."""
        self._abandon()

    async def wait(self) -> Any:
        """The answer, for who has a task to wait in."""
        return await self

    def __await__(self) -> Generator[Any, None, Any]:
        """As `wait`."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._future = future

        def tell(value: Any, error: Exception | None) -> None:
            if future.done():  # cancelled
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        self.then(tell)
        try:
            if future.done():  # before this first step, as a cancellation may have: that is next
                yield
            return (yield from future)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancel()
            raise


class _Waiting:
    """One of them; `m` is the call, see `Controller.lease`."""

    __slots__ = ("found", "later", "m", "peer", "shape", "timer")

    def __init__(self, m: list[Any], peer: Peer, shape: Shape) -> None:
        self.m, self.peer, self.shape = m, peer, shape
        self.later: Later | None = None
        self.found: list[Any] | None = None
        self.timer: asyncio.TimerHandle | None = None


class Handouts:
    """Who waits, by task, in the order in which they came.

    Attributes:
        served: called after somebody who waited was given rows.
    """

    def __init__(
        self,
        lease: Callable[[list[Any]], list[Any] | None],
        give_back: Callable[[list[Any]], None],
        ready: Callable[[str], int | None],
        follow: Callable[[], None],
    ) -> None:
        """Nobody waits.

        Args:
            lease: makes a hand-out, if it can.
            give_back: takes one back.
            ready: rows of a task that are ready; None of one that ended.
            follow: does what follows from a hand-out that was made, or taken back, by the time.
        """
        self._lease, self._give_back = lease, give_back
        self._ready, self._follow = ready, follow
        self._waiting: dict[str, dict[_Waiting, None]] = {}  # in place of sets, for the order
        self.served: Callable[[], None] = lambda: None

    @property
    def waiting(self) -> bool:
        """Whether somebody does."""
        return bool(self._waiting)

    def wait(self, m: list[Any], peer: Peer, shape: Shape) -> Later:
        """Wait for rows, as long as the call says; the answer is `shape` of what there is."""
        waiting = _Waiting(m, peer, shape)
        waiting.later = Later(lambda: self._abandon(waiting))
        self._waiting.setdefault(m[0], {})[waiting] = None
        waiting.timer = asyncio.get_running_loop().call_later(m[7], self._expire, waiting)
        return waiting.later

    def serve(self, task: str) -> None:
        """Rows of a task are ready, or it ended: who can go on does."""
        for waiting in list(self._waiting.get(task, ())):
            if waiting not in self._waiting.get(task, ()):
                continue  # gone with an answer to somebody before it
            self._try(waiting)
            if self._ready(task) == 0:
                break

    def hurry(self, peer: Peer, task: str, requester: str) -> None:
        """Those of a requester end, with nothing."""
        for waiting in list(self._waiting.get(task, ())):
            if waiting.peer is peer and waiting.m[1] == requester:
                self._end(waiting, None)

    def _expire(self, waiting: _Waiting) -> None:
        if self._try(waiting):  # for a row that came together with the deadline
            self._follow()
        else:
            self._end(waiting, None)

    def _try(self, waiting: _Waiting) -> bool:
        """Whether it ended."""
        found: list[Any] | None = None
        error: Exception | None = None
        assert waiting.later is not None
        if waiting.peer.alive and not waiting.later.cancelled:
            try:
                found = self._lease(waiting.m)
            except Exception as failure:  # noqa: BLE001 - crosses to the caller
                error = failure
            if found is None and error is None:
                return False
        self._end(waiting, found, error)
        return True

    def _end(
        self, waiting: _Waiting, found: list[Any] | None, error: Exception | None = None
    ) -> None:
        self._forget(waiting)
        assert waiting.later is not None
        waiting.found = found
        waiting.later.come(None if error else waiting.shape(found), error)
        self._stop(waiting)  # after the answer, for which somebody waits
        if found is not None:
            self.served()

    def _abandon(self, waiting: _Waiting) -> None:
        self._forget(waiting)
        self._stop(waiting)
        if waiting.found is not None:  # cancelled in the very turn of the loop in which it came
            self._give_back(waiting.found)
            self._follow()

    def _forget(self, waiting: _Waiting) -> None:
        here = self._waiting.get(waiting.m[0], {})
        if here.pop(waiting, waiting) is None and not here:
            del self._waiting[waiting.m[0]]

    def _stop(self, waiting: _Waiting) -> None:
        if waiting.timer is not None:
            waiting.timer.cancel()
