"""Threads that carry one kind of traffic each, in order.

A lane runs jobs one after another in the order they were submitted, on a thread (and CUDA stream)
of its own. Who submits in the same order on every rank needs to fear no deadlock, however the
threads' timing differs. The submitter waits on a job's event, never on the queue.

Concurrency: one thread submits. A job that fails fails all after it: the other ranks can no longer
be in step. The error is raised where the job, or a later one, is waited for or submitted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from asyncflow_core.errors import EngineError, ServiceClosedError

__all__ = ["Job", "Lane"]

_JOIN_S = 10.0
"""A thread that waits for a dead rank is left behind after that; it is a daemon."""


def _event() -> torch.cuda.Event:
    cuda: Any = torch.cuda  # its constructors are untyped
    event: torch.cuda.Event = cuda.Event()
    return event


class Job:
    """Work under way: `wait` for its end."""

    __slots__ = ("_done", "_lane", "_work", "after", "error", "finished", "what")

    def __init__(self, what: str, work: Callable[[], None], lane: Lane) -> None:
        self.what = what
        self.error: EngineError | None = None
        self.after: torch.cuda.Event | None = None
        self.finished: torch.cuda.Event | None = None
        self._work = work
        self._lane = lane
        self._done = threading.Event()

    def run(
        self, failure: EngineError | None, stream: torch.cuda.Stream | None = None
    ) -> EngineError | None:
        """Do the work unless an earlier job failed; returns what failed."""
        self.error = failure
        if failure is None:
            try:
                self._work()
            except Exception as error:  # noqa: BLE001 - raised again where it is waited for
                self.error = EngineError(f"{self._lane.name} of {self.what} failed: {error}")
                self.error.__cause__ = error
        if stream is not None:
            self.finished = _event()
            self.finished.record(stream)
        self._done.set()
        return self.error

    def wait(self) -> None:
        """Let the caller (on CUDA: its stream) go on when the work is done.

        Raises:
            EngineError: this job or one before it failed; names the unit.
        """
        self._done.wait()
        if self.error is not None:
            raise self.error
        if self.finished is not None:
            # Of the lane's device: this thread's current one may be another.
            torch.cuda.current_stream(self._lane.device).wait_event(self.finished)


class Lane:
    """An ordered queue with a thread; without one (`threaded=False`) jobs run when submitted."""

    def __init__(self, name: str, *, device: torch.device, threaded: bool) -> None:
        self.name = name
        self.device = device
        self._cuda = device.type == "cuda"
        cuda: Any = torch.cuda  # its constructors are untyped
        self._stream: torch.cuda.Stream | None = cuda.Stream(device) if self._cuda else None
        self._failure: EngineError | None = None
        self._queue: deque[Job | None] = deque()
        self._filled = threading.Semaphore(0)
        self._closed = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._serve, name=f"hzp-{name}", daemon=True)
            self._thread.start()

    def submit(self, what: str, work: Callable[[], None]) -> Job:
        """Queue work behind all submitted before."""
        if self._closed:
            raise ServiceClosedError(f"the {self.name} lane is closed")
        job = Job(what, work, self)
        if self._cuda:
            job.after = _event()
            job.after.record(torch.cuda.current_stream(self.device))
        if self._thread is None:
            self._run(job)
        else:
            self._queue.append(job)
            self._filled.release()
        return job

    def _serve(self) -> None:
        if self._cuda:
            torch.cuda.set_device(self.device)
        while True:
            self._filled.acquire()
            job = self._queue.popleft()
            if job is None:
                return
            self._run(job)

    def _run(self, job: Job) -> None:
        if self._stream is None or job.after is None:
            self._failure = job.run(self._failure)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(job.after)
            self._failure = job.run(self._failure, self._stream)

    def close(self) -> None:
        """Finish what is queued, then end the thread; may be called twice."""
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.append(None)
            self._filled.release()
            thread.join(_JOIN_S)
