"""Helpers of the conformance kits."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

from asyncflow_core.services.weight_sync import Bucket, ManifestBuilder, WeightManifest

__all__ = ["collect", "eventually", "manifest_of", "requires", "stream"]

T = TypeVar("T")


async def eventually(
    condition: Callable[[], bool | Awaitable[bool]], *, timeout_s: float = 10.0
) -> None:
    """Wait until the condition, a function or coroutine function, holds.

    Raises:
        AssertionError: it did not hold in time.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.0
    while True:
        holds = condition()
        if await holds if inspect.isawaitable(holds) else holds:
            return
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {condition}"
        await asyncio.sleep(pause_s)
        pause_s = min(0.01, pause_s + 1e-4)


async def collect(items: AsyncIterator[T]) -> list[T]:
    """All items."""
    return [item async for item in items]


async def stream(items: Iterable[T], *, error: BaseException | None = None) -> AsyncIterator[T]:
    """The items one by one; then the error, where one is given."""
    for item in items:
        yield item
    if error is not None:
        raise error


def manifest_of(buckets: Iterable[Bucket], version: int, *, life: int = 0) -> WeightManifest:
    """The manifest of buckets that are all there."""
    builder = ManifestBuilder(version, life)
    for bucket in buckets:
        builder.add(bucket)
    return builder.build()


def requires(declared: object, capability: str) -> None:
    """Skip the running test with the capability that is not declared."""
    import pytest

    if not declared:
        pytest.skip(f"not declared: {capability}")
