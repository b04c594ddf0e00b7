"""Taking a version's buckets in: checked, counted, written. Runs on a thread, call by call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from asyncflow_core.services.weight_sync import Bucket, ManifestBuilder, TensorSpec, WeightManifest
from asyncflow_weights_host.files import SegmentWriter
from asyncflow_weights_host.locator import BucketPlace, Locator, here

__all__ = ["Intake", "in_thread"]

_T = TypeVar("_T")


async def in_thread(
    function: Callable[..., _T], *arguments: Any, undo: Callable[[_T], object] | None = None
) -> _T:
    """Run on a thread and, if cancelled, first wait for it: it uses a file that is then closed.

    Args:
        function: what to run.
        *arguments: its arguments.
        undo: what to do with a result that nobody is left to take.
    """
    future = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue
        # An exception is seen with it: the cancellation is what is reported.
        if not future.cancelled() and future.exception() is None and undo is not None:
            undo(future.result())
        raise


class Intake:
    """One version on its way into a file."""

    def __init__(self, writer: SegmentWriter, version: int, life: int) -> None:
        """Fill the writer's file."""
        self._writer = writer
        self._version, self._life = version, life
        self._builder = ManifestBuilder(version, life)
        self._places: list[BucketPlace] = []
        self._count = 0
        self._tensors: tuple[TensorSpec, ...] = ()
        self._expected: tuple[BucketPlace, ...] = ()

    def expect(
        self, manifest: WeightManifest, locator: Locator, path: Path
    ) -> tuple[WeightManifest, Locator]:
        """Let the file be read while it is filled, as one that is laid out like an earlier version.

        Returns:
            What will be there if it is; without a checksum.

        Raises:
            OSError: there is no room.
        """
        nbytes = max(place.offset + place.nbytes for place in locator.buckets)
        self._writer.appear(path, nbytes)
        self._tensors, self._expected = manifest.tensors, locator.buckets
        made = replace(manifest, version=self._version, life=self._life, checksum="")
        return made, replace(locator, path=str(path), nbytes=nbytes)

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
        if self._as_expected(bucket):
            self._writer.land(len(self._places))
        else:
            self._writer.give_up()

    def _as_expected(self, bucket: Bucket) -> bool:
        """Whether a bucket is where, and what, readers were told; once not, no further one is."""
        number, first = len(self._places), self._count - len(bucket.specs)
        found = tuple(replace(spec, offset=0) for spec in bucket.specs)
        if (
            self._expected[:number][-1:] != tuple(self._places[-1:])
            or self._tensors[first : self._count] != found
        ):
            self._expected = ()
        return bool(self._expected)

    def finish(self, path: Path) -> tuple[WeightManifest, Locator]:
        """Make the file appear under its name.

        Raises:
            OSError: there is no room.
        """
        manifest = self._builder.build()
        nbytes = self._writer.finish(path)
        host, boot_id = here()
        return manifest, Locator(host, boot_id, str(path), nbytes, tuple(self._places))

    def abort(self) -> None:
        """Leave nothing. Does nothing after `finish`."""
        self._writer.abort()
