"""A thread for blocking work that does not hold up the end of its process.

`concurrent.futures` joins its threads when the interpreter ends, so that a reward which never
returns would keep a run that was interrupted, or that failed, alive for ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

__all__ = ["DaemonThread"]

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThread(Executor):
    """Runs calls one after another on one daemon thread."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call; `RuntimeError` after `shutdown`."""
        if self._closed:
            raise RuntimeError(f"the thread {self._thread.name!r} takes no calls any more")
        future: Future[T] = Future()
        self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; the one that runs is left alone."""
        self._closed = True
        if cancel_futures:
            with contextlib.suppress(Empty):
                while (waiting := self._calls.get_nowait()) is not None:
                    waiting[0].cancel()
        self._calls.put(None)
        if wait:
            self._thread.join()

    def _work(self) -> None:
        while (taken := self._calls.get()) is not None:
            future, call = taken
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
                    future.set_exception(error)
            del taken, future, call  # or they would live until the next one
