"""The WeightSync service over the files of `files.py`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.errors import BackpressureError, ConfigError, ServiceError
from asyncflow_core.parts import PartContext
from asyncflow_core.services.versioned import VersionedWeightSync
from asyncflow_core.services.weight_sync import (
    Bucket,
    PublishedWeights,
    WeightSource,
)
from asyncflow_weights_host.files import (
    Mappings,
    PublisherDirectory,
    landed,
    publisher_gone,
    sweep,
)
from asyncflow_weights_host.intake import Intake, in_thread
from asyncflow_weights_host.locator import Locator, here
from asyncflow_weights_host.options import HostOptions

__all__ = ["HostWeightSync"]

_log = logging.getLogger(__name__)
_LOOK_S = 0.001
"""Between two looks for a bucket that is still to come: a few a bucket."""
_LOOKS = 200
"""Looks from one to the next for the publisher itself."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class HostWeightSync(VersionedWeightSync):
    """One side of the transport; the publishing side owns the files.

    At most `versions` files exist, each as large as the model; a retired file's pages are used for
    the next version unless a replica still reads them. A replica's buckets are read-only views of
    the file: nothing is copied, and they stay valid for as long as they are referenced.
    """

    transport = "host"

    def __init__(self, options: HostOptions, ctx: PartContext) -> None:
        """Keep the arguments."""
        super().__init__(
            ctx.name, versions=options.versions, publish_timeout_s=options.publish_timeout_s
        )
        self._options = options
        self._run_dir = ctx.run_dir
        self._root: Path | None = None
        self._directory: PublisherDirectory | None = None
        self._paths: dict[tuple[int, int], Path] = {}
        self._mappings = Mappings()
        self._last: PublishedWeights | None = None
        self._coming: dict[tuple[int, int], asyncio.Future[PublishedWeights | None]] = {}

    async def open(self) -> None:
        """Find the directory and remove what dead publishers left in it.

        Raises:
            ConfigError: there is no run directory and no option `directory`, or it is no use.
        """
        root = self._options.directory
        if root is None:
            if self._run_dir is None:
                raise ConfigError(
                    "weight_sync.host has no run directory to put files in; set its option "
                    "'directory', such as /dev/shm/asyncflow"
                )
            root = self._run_dir / "weights"
        try:
            swept = await in_thread(sweep, root)
        except OSError as error:
            raise ConfigError(
                f"weight_sync.host cannot use the directory {root}: {error}"
            ) from error
        for stale in swept:
            _log.warning("removed the weights a dead publisher left in %s", stale)
        self._root = root
        self._is_open = True

    async def aclose(self) -> None:
        """Remove all own files; a publish that waits or runs fails with `ServiceClosedError`."""
        directory, self._directory = self._directory, None
        self._closed()
        for asked in self._coming.values():
            if not asked.done():
                asked.set_result(None)
        self._root = None
        self._paths.clear()
        self._mappings.close()
        if directory is not None:
            await in_thread(directory.close)

    async def publish(
        self, version: int, life: int, buckets: AsyncIterator[Bucket]
    ) -> PublishedWeights:
        """As of `WeightSync`; from the second version on, `coming` tells of it at once."""
        try:
            return await super().publish(version, life, buckets)
        finally:
            asked = self._coming.pop((version, life), None)
            if asked is not None and not asked.done():
                asked.set_result(None)

    async def coming(self, version: int, life: int) -> PublishedWeights | None:
        """What can be fetched of a version being published: it is laid out like the one before.

        Where it is not, what was fetched ends with an error, or has another checksum.
        """
        self._check_open()
        if (version, life) in self._held:
            return None
        try:
            async with asyncio.timeout(self._publish_timeout_s):
                coming = await asyncio.shield(self._asked(version, life))
        except TimeoutError:
            return None
        self._check_open()
        return coming

    def _asked(self, version: int, life: int) -> asyncio.Future[PublishedWeights | None]:
        future: asyncio.Future[PublishedWeights | None] = asyncio.get_running_loop().create_future()
        return self._coming.setdefault((version, life), future)

    async def _take(
        self, version: int, life: int, buckets: AsyncIterator[Bucket]
    ) -> PublishedWeights:
        # Only copying goes to a thread: what a cancellation could tear from its bookkeeping, the
        # files' coming and going, is quick and happens here.
        with self._disk_errors(version):
            if self._directory is None:
                self._directory = PublisherDirectory(self._open_root())
            directory = self._directory
            intake = Intake(directory.writer(), version, life)
            name = directory.name(version, life)
        try:
            if self._last is not None:
                with self._disk_errors(version):
                    manifest, locator = intake.expect(
                        self._last.manifest, Locator.of(self._last), name
                    )
                asked = self._asked(version, life)
                if not asked.done():
                    asked.set_result(PublishedWeights(manifest, "host", locator.to_dict()))
            async for bucket in buckets:
                with self._disk_errors(version):
                    await in_thread(intake.add, bucket)
            with self._disk_errors(version):
                manifest, locator = intake.finish(name)
        finally:
            intake.abort()
        self._paths[version, life] = Path(locator.path)
        self._last = PublishedWeights(manifest, "host", locator.to_dict())
        return self._last

    async def _drop(self, key: tuple[int, int]) -> None:
        assert self._directory is not None, "what is held lies there"
        left = self._directory.retire(self._paths.pop(key))
        if left is not None:
            await in_thread(left.unlink, True)

    @contextlib.contextmanager
    def _disk_errors(self, version: int) -> Iterator[None]:
        root = self._open_root()
        try:
            yield
        except OSError as error:
            self._open_root()  # files that `aclose` removed are no fault of the disk
            raise self._disk_error(error, version, root) from error
        self._open_root()

    async def attach(self, replica: str, published: PublishedWeights) -> None:
        """Check that this process can map what was published.

        Raises:
            ServiceError: another transport, another machine, or a file that cannot be seen.
        """
        self._open_root()
        self._check_transport(replica, published)
        locator = Locator.of(published)
        name, boot_id = here()
        if boot_id != locator.boot_id:
            raise self._error(
                f"replica {replica!r} runs on host {name!r}, the weights lie in the memory of host "
                f"{locator.host!r}; place both on one host, or use a weight_sync that crosses hosts"
            )
        await self._map(published, locator)

    async def fetch(self, published: PublishedWeights) -> WeightSource:
        """Map the file; the source yields the published buckets as read-only views.

        Raises:
            ServiceError: it was retired or cannot be seen from here.
        """
        self._open_root()
        locator = Locator.of(published)
        mapping = await self._map(published, locator)
        return WeightSource(published.manifest, self._buckets(mapping, published, locator))

    async def _map(self, published: PublishedWeights, locator: Locator) -> NDArray[np.uint8]:
        try:
            if self._mappings.knows(Path(locator.path)):
                return self._mappings.view(Path(locator.path), locator.nbytes)
            return await in_thread(self._mappings.view, Path(locator.path), locator.nbytes)
        except (OSError, ValueError) as error:
            raise self._error(
                f"version {published.manifest.version} cannot be read at {locator.path} "
                f"({error}); it was retired, its publisher is gone, or the directory is not "
                f"visible from this process"
            ) from error

    async def _buckets(
        self, mapping: NDArray[np.uint8], published: PublishedWeights, locator: Locator
    ) -> AsyncIterator[Bucket]:
        for number, place in enumerate(locator.buckets):
            await self._landed(mapping, number, published, locator)
            specs = place.specs(published.manifest.tensors)
            self._fetched += sum(spec.nbytes for spec in specs)
            yield Bucket(specs, mapping[place.offset : place.offset + place.nbytes])

    async def _landed(
        self, mapping: NDArray[np.uint8], number: int, published: PublishedWeights, locator: Locator
    ) -> None:
        """Wait until a bucket is there."""
        version, looks = published.manifest.version, 0
        while (there := landed(mapping)) <= number:
            self._check_open()
            if there < 0:
                raise self._error(
                    f"version {version} comes no further than bucket {number}: publishing it "
                    f"failed, or it is laid out in another way than the version before"
                )
            if looks % _LOOKS == _LOOKS - 1 and self._publisher_gone(version, locator):
                raise self._error(
                    f"version {version} comes no further than bucket {number}: its publisher ended"
                )
            looks += 1
            await asyncio.sleep(_LOOK_S)

    def _publisher_gone(self, version: int, locator: Locator) -> bool:
        try:
            return publisher_gone(Path(locator.path).parent)
        except OSError as error:
            raise self._error(
                f"version {version} is still coming, and whether its publisher lives cannot be "
                f"told: {error}"
            ) from error

    def _open_root(self) -> Path:
        self._check_open()
        assert self._root is not None
        return self._root

    def _disk_error(self, error: OSError, version: int, root: Path) -> ServiceError:
        if error.errno not in _NO_ROOM:
            return self._error(f"version {version} could not be written in {root}: {error}")
        free = shutil.disk_usage(root).free
        return BackpressureError(
            f"version {version} does not fit in {root} ({error.strerror}, {free} bytes free); "
            f"every version held takes the model's size: free memory there, or set the options "
            f"'versions' or 'directory'",
            service=self._name,
        )
