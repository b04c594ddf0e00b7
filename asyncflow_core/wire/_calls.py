"""What a server knows of its clients and their calls."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncflow_core.errors import WireDecodeError
from asyncflow_core.wire import _protocol as p

__all__ = [
    "Method",
    "Peer",
    "Running",
    "arguments_of",
    "cancel",
    "start_timer",
    "stop_timer",
    "window_of",
]


@dataclass(frozen=True, slots=True)
class Method:
    """Something to call.

    Attributes:
        function: a coroutine function, or for `streams` one that returns an async iterator.
        arguments: plain values by name to those `function` takes; raises `WireDecodeError`.
        streams: it yields items.
        takes_peer: it is given the caller as `peer`.
        inline: a plain function that answers at once, without a task; where it has to wait it
            returns a coroutine instead, which goes on as any call.
    """

    function: Callable[..., Any]
    arguments: Callable[[dict[str, Any]], dict[str, Any]]
    streams: bool = False
    takes_peer: bool = False
    inline: bool = False


@dataclass(slots=True, eq=False)
class Running:
    """One call under way; `why`: what ended it from outside. `begun`: it took its first step."""

    timeout_s: float | None
    task: asyncio.Task[None] | None = None
    begun: bool = False
    timer: asyncio.TimerHandle | None = None
    why: Literal["", "timeout", "cancelled"] = ""
    credit: int = 0
    wake: asyncio.Future[None] | None = None


@dataclass(slots=True, eq=False)
class Peer:
    """A client that has shown the token.

    Attributes:
        name: as the client calls itself; unique among the living clients of a run.
        alive: False once it is known to be gone.
    """

    identity: bytes
    name: str
    alive: bool = True
    running: dict[int, Running] = field(default_factory=dict)


def arguments_of(method: Method, plain: dict[Any, Any]) -> dict[str, Any]:
    """What a method is called with.

    Raises:
        WireDecodeError: the call's arguments are not the method's.
    """
    if not all(type(name) is str for name in plain):
        raise WireDecodeError("arguments were given by something that is no name")
    return method.arguments(plain)


def start_timer(running: Running) -> None:
    """Cancel it when its deadline passes."""
    if running.timeout_s is not None and math.isfinite(running.timeout_s):
        running.timer = asyncio.get_running_loop().call_later(
            running.timeout_s, cancel, running, "timeout"
        )


def stop_timer(running: Running) -> None:
    """It ended, or waits for its reader."""
    if running.timer is not None:
        running.timer.cancel()
        running.timer = None


def cancel(running: Running, why: Literal["timeout", "cancelled"]) -> None:
    """End it from outside; the first reason counts."""
    if not running.why and running.task is not None:
        running.why = why
        if running.begun:  # at once: what comes in the same turn is not for it
            running.task.cancel()
        else:  # not before its first step: what the call holds would never be let go
            asyncio.get_running_loop().call_soon(running.task.cancel)


def window_of(rest: list[Any]) -> int:
    """How many items of a stream may be under way, as its call says."""
    match rest:
        case [int(window)] if 1 <= window <= p.MAX_WINDOW:
            return window
    raise WireDecodeError(f"a stream's window is not from 1 to {p.MAX_WINDOW}: {rest!r:.60}")
