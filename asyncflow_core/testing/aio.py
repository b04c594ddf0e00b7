"""Helpers of the conformance kits."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

from asyncflow_core.services.weight_sync import Bucket, ManifestBuilder, WeightManifest

__all__ = ["collect", "eventually", "manifest_of", "requires", "stream"]

T = TypeVar("T")


async def eventually(
    condition: Callable[[], Any] | Callable[[], Awaitable[Any]], *, timeout_s: float = 10.0
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
    pause_s = 0.0  # at first every turn of the loop is looked at, later a hundred a second
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if loop.time() >= deadline:
            raise AssertionError(f"still {value!r} after {timeout_s} s")
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
