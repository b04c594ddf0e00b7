"""Taking a version's buckets in: checked, counted, written. Runs on a thread, call by call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from asyncflow_core.errors import DataError
from asyncflow_core.services.weight_sync import Bucket, ManifestBuilder, WeightManifest
from asyncflow_weights_host.files import SegmentWriter
from asyncflow_weights_host.locator import BucketPlace, Locator, here

__all__ = ["Intake", "in_thread"]

_T = TypeVar("_T")


async def in_thread(function: Callable[..., _T], *arguments: Any) -> _T:
    """Run on a thread and, if cancelled, first wait for it: it uses a file that is then closed."""
    future = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue
        if not future.cancelled():
            future.exception()  # seen: the cancellation is what is reported
        raise


class Intake:
    """One version on its way into a file."""

    def __init__(self, writer: SegmentWriter, version: int, life: int) -> None:
        """Fill the writer's file."""
        self._writer = writer
        self._version = version
        self._builder = ManifestBuilder(version, life)
        self._places: list[BucketPlace] = []
        self._count = 0

    def add(self, bucket: Bucket) -> None:
        """Take a bucket.

        Raises:
            DataError: a tensor outside the bucket or seen before.
            OSError: there is no room.
        """
        offset, pages = self._writer.place(len(bucket.data))
        self._builder.add(bucket, into=pages)
        if pages is None:
            self._writer.write(offset, bucket.data)
        tensors = tuple((self._count + n, spec.offset) for n, spec in enumerate(bucket.specs))
        self._count += len(tensors)
        self._places.append(BucketPlace(offset, len(bucket.data), tensors))

    def finish(self, path: Path) -> tuple[WeightManifest, Locator]:
        """Make the file appear under its name.

        Raises:
            DataError: there was no tensor.
            OSError: there is no room.
        """
        if not self._count:
            raise DataError(f"version {self._version} has no tensor; there is nothing to publish")
        manifest = self._builder.build()
        nbytes = self._writer.finish(path)
        host, boot_id = here()
        return manifest, Locator(host, boot_id, str(path), nbytes, tuple(self._places))

    def abort(self) -> None:
        """Leave nothing. Does nothing after `finish`."""
        self._writer.abort()
