"""The WeightSync service over directories of safetensors files."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from asyncflow_core.errors import BackpressureError, ConfigError, DataError, ServiceError
from asyncflow_core.parts import PartContext
from asyncflow_core.services.versioned import VersionedWeightSync
from asyncflow_core.services.weight_sync import (
    Bucket,
    PublishedWeights,
    WeightSource,
    check_tensors,
)
from asyncflow_weights_host.disk import (
    VersionWriter,
    lock_for_reading,
    read_file,
    remove_unread,
    safetensors_files,
)
from asyncflow_weights_host.files import PublisherDirectory, sweep
from asyncflow_weights_host.intake import in_thread
from asyncflow_weights_host.options import DiskOptions

__all__ = ["DiskWeightSync"]

_log = logging.getLogger(__name__)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskWeightSync(VersionedWeightSync):
    """One side of the transport; the publishing side owns the directories.

    A retired version is removed once no replica reads it: at once, or at a later publish, retire or
    close. A replica reads a version from its fetch to the next one, or to its close.
    """

    transport = "disk"

    def __init__(self, options: DiskOptions, ctx: PartContext) -> None:
        """Keep the arguments."""
        super().__init__(
            ctx.name or "disk",
            versions=options.versions,
            publish_timeout_s=options.publish_timeout_s,
        )
        self._options = options
        self._run_dir = ctx.run_dir
        self._root: Path | None = None
        self._own: PublisherDirectory | None = None
        self._paths: dict[tuple[int, int], Path] = {}
        self._unwanted: set[Path] = set()
        self._serial = 0
        self._reading: int | None = None

    async def open(self) -> None:
        """Find the directory and remove what dead publishers left in it.

        Raises:
            ConfigError: there is no run directory and no option `directory`, or it is no use.
        """
        if self._options.directory is None and self._run_dir is None:
            raise ConfigError(
                "weight_sync.disk has no run directory to put files in; set its option 'directory'"
            )
        root = self._options.directory or Path(self._run_dir or "") / "weights-disk"
        try:
            swept = await in_thread(sweep, root)
        except OSError as error:
            raise ConfigError(
                f"weight_sync.disk cannot use the directory {root}: {error}"
            ) from error
        for stale in swept:
            _log.warning("removed the weights a dead publisher left in %s", stale)
        self._root, self._is_open = root, True

    async def aclose(self) -> None:
        """Remove what nobody reads; what somebody reads is left to the next sweep."""
        own, self._own = self._own, None
        self._closed()
        self._let_go()
        self._unwanted |= set(self._paths.values())
        self._paths.clear()
        if own is not None:
            await self._prune()
            await in_thread(own.close, not self._unwanted)

    async def _take(
        self, version: int, life: int, buckets: AsyncIterator[Bucket]
    ) -> PublishedWeights:
        assert self._root is not None
        writer = None
        try:
            if self._own is None:
                self._own = await in_thread(PublisherDirectory, self._root)
            await self._prune()
            self._serial += 1
            writer = VersionWriter(
                self._own.path, self._serial, version, life, self._options.shard_bytes
            )
            async for bucket in buckets:
                self._check_open()
                await in_thread(writer.add, bucket)
            manifest, path = await in_thread(writer.finish)
        except OSError as error:
            self._check_open()
            raise self._disk_error(error, version) from error
        finally:
            if writer is not None:
                await in_thread(writer.abort)
        self._check_open()
        self._paths[version, life] = path
        return PublishedWeights(manifest, "disk", {"path": str(path)})

    def _disk_error(self, error: OSError, version: int) -> ServiceError:
        root = self._root or Path()
        if error.errno not in _NO_ROOM:
            return self._error(f"version {version} could not be written in {root}: {error}")
        return BackpressureError(
            f"version {version} does not fit in {root} ({error.strerror}, "
            f"{shutil.disk_usage(root).free} bytes free); free some, or set the options 'versions' "
            f"or 'directory'",
            service=self._name,
        )

    async def _drop(self, key: tuple[int, int]) -> None:
        self._unwanted.add(self._paths.pop(key))
        await self._prune()

    async def _prune(self) -> None:
        for path in list(self._unwanted):
            if await in_thread(remove_unread, path):
                self._unwanted.discard(path)

    async def attach(self, replica: str, published: PublishedWeights) -> None:
        """Check that the version can be seen from here.

        Raises:
            ServiceError: another transport, or a directory that is not there.
        """
        self._check_open()
        self._check_transport(replica, published)
        os.close(await self._lock(published))

    async def fetch(self, published: PublishedWeights) -> WeightSource:
        """The directory, or the content of its files, held until the next fetch.

        Raises:
            ServiceError: it was retired or cannot be seen from here.
            DataError: the files do not have the manifest's tensors.
        """
        self._check_open()
        lock = await self._lock(published)
        self._let_go()
        self._reading = lock
        path, manifest = Path(published.locator["path"]), published.manifest
        buckets = [await in_thread(read_file, file) for file in safetensors_files(path)]
        check_tensors([spec for b in buckets for spec in b.specs], manifest.tensors)
        if self._options.source == "path":
            self._fetched += manifest.nbytes
            return WeightSource(manifest, path=str(path))
        return WeightSource(manifest, self._content(buckets))

    async def _content(self, buckets: list[Bucket]) -> AsyncIterator[Bucket]:
        for bucket in buckets:
            self._fetched += sum(spec.nbytes for spec in bucket.specs)
            yield bucket

    async def _lock(self, published: PublishedWeights) -> int:
        where: Any = published.locator.get("path")
        if not isinstance(where, str):
            raise DataError(f"not a locator of the transport 'disk': {published.locator!r:.80}")
        try:
            return await in_thread(lock_for_reading, Path(where), undo=os.close)
        except OSError as error:
            raise self._error(
                f"version {published.manifest.version} cannot be read in {where} ({error}); it was "
                f"retired, its publisher is gone, or the directory is not visible from this process"
            ) from error

    def _let_go(self) -> None:
        if self._reading is not None:
            os.close(self._reading)
            self._reading = None
