"""Waiting in tests, without fixed sleeps."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["eventually"]


async def eventually(
    condition: Callable[[], Any] | Callable[[], Awaitable[Any]], *, timeout_s: float = 5.0
) -> Any:
    """Poll until `condition()` is true, and return its value.

    Args:
        condition: a function, plain or async.
        timeout_s: how long to try.

    Raises:
        AssertionError: it was still false, with its last value.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if loop.time() >= deadline:
            raise AssertionError(f"still {value!r} after {timeout_s} s")
        await asyncio.sleep(0.002)
