"""The WeightSync service over ZeroMQ: versions in the trainer's memory, passed on by replicas."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.errors import ConfigError, DataError, PeerLostError
from asyncflow_core.parts import PartContext
from asyncflow_core.services.versioned import VersionedWeightSync
from asyncflow_core.services.weight_sync import (
    Bucket,
    Checksum,
    ManifestBuilder,
    PublishedWeights,
    TensorSpec,
    WeightManifest,
    WeightSource,
    WeightSyncStats,
)
from asyncflow_core.wire import KeyPair, is_local, split_key
from asyncflow_weights_host import delta
from asyncflow_weights_host.held import Held, Pool
from asyncflow_weights_host.intake import in_thread
from asyncflow_weights_host.locator import here
from asyncflow_weights_host.node import Node, Origin
from asyncflow_weights_host.options import ZmqOptions
from asyncflow_weights_host.protocol import TOKEN_BYTES, Content
from asyncflow_weights_host.sockets import Sockets, socket_name, sweep_sockets
from asyncflow_weights_host.zmq_locator import DeltaOffer, ZmqLocator, places_in

__all__ = ["ZmqWeightSync"]

_log = logging.getLogger(__name__)
_SUN_PATH_BYTES = 107


@dataclass(frozen=True, slots=True, eq=False)
class _Base:
    """A version whose bytes are known to be right; what a delta is made from, or applied to."""

    manifest: WeightManifest
    buckets: Sequence[Bucket]

    def fits(self, buckets: Sequence[Bucket]) -> bool:
        return [(b.specs, len(b.data)) for b in self.buckets] == [
            (b.specs, len(b.data)) for b in buckets
        ]


class ZmqWeightSync(VersionedWeightSync):
    """One side of the transport.

    The publisher holds `versions` of them in memory. A replica pulls a version in the background,
    from the fetch on, and passes it on to the next replica; it holds the last version it took.
    """

    transport = "zmq"

    def __init__(self, options: ZmqOptions, ctx: PartContext) -> None:
        """Keep the arguments."""
        super().__init__(
            ctx.name or "zmq",
            versions=options.versions,
            publish_timeout_s=options.publish_timeout_s,
        )
        self._options = options
        self._run_dir = ctx.run_dir
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._client = KeyPair.new()
        self._node: Node | None = None
        self._bases: dict[bytes, _Base] = {}
        self._pulled: dict[Content, None] = {}
        self._pool = Pool()

    async def open(self) -> None:
        """Take calls; sockets are made by the first of them. What killed processes left goes.

        Raises:
            ConfigError: `listen` is no address, or needs a run directory that is not there.
        """
        self._listen_address()
        if self._options.listen == "ipc":
            await in_thread(sweep_sockets, Path(self._run_dir or ""))
        self._is_open = True

    def _listen_address(self) -> str:
        listen = self._options.listen
        if listen != "ipc":
            is_local(listen)
            return listen
        if self._run_dir is None:
            raise ConfigError(
                "weight_sync.zmq has no run directory for its sockets; set its option 'listen', "
                "such as tcp://127.0.0.1:*"
            )
        path = Path(self._run_dir) / socket_name()
        if len(os.fsencode(path)) > _SUN_PATH_BYTES:
            raise ConfigError(f"the socket path {path} is longer than {_SUN_PATH_BYTES} bytes")
        return f"ipc://{path}"

    async def aclose(self) -> None:
        """Close all sockets and free everything; what others still pull from here fails."""
        self._closed()
        node, self._node = self._node, None
        self._bases.clear()
        self._pulled.clear()
        if node is not None:
            await in_thread(node.stop)

    def _running(self) -> Node:
        if self._node is None:
            self._node = Node(Sockets(), self._listen_address(), stall_s=self._options.stall_s)
            self._node.start()
        return self._node

    def _trusting(self, locator: ZmqLocator) -> Node:
        node = self._running()
        node.trust(locator.origin)
        return node

    async def _take(
        self, version: int, life: int, buckets: AsyncIterator[Bucket]
    ) -> PublishedWeights:
        node = self._running()
        origin = Origin(node.address, self._token, self._client)
        node.trust(origin)
        builder, taken = ManifestBuilder(version, life), []
        async for bucket in buckets:
            data = self._pool.take(len(bucket.data))
            await in_thread(lambda b=bucket, d=data: builder.add(b, into=d))
            taken.append(Bucket(bucket.specs, data))
        self._pool.trim()
        self._check_open()
        manifest = builder.build()
        offer = await self._hold_delta(node, manifest, taken) if self._options.delta else None
        self._check_open()
        node.hold(Content(self._token, version, life, False), Held.whole([b.data for b in taken]))
        locator = ZmqLocator(*here(), origin, places_in(taken), offer)
        return PublishedWeights(manifest, "zmq", locator.to_dict())

    async def _hold_delta(
        self, node: Node, manifest: WeightManifest, taken: Sequence[Bucket]
    ) -> DeltaOffer | None:
        """Make the delta from the version before, where there is one of the same shape."""
        base = self._bases.pop(self._token, None)
        self._bases[self._token] = _Base(manifest, taken)
        if base is None or not base.fits(taken):
            return None
        encoded = [
            await in_thread(delta.encode, old.data, new.data, new.specs)
            for old, new in zip(base.buckets, taken, strict=True)
        ]
        node.hold(Content(self._token, manifest.version, manifest.life, True), Held.whole(encoded))
        sizes = tuple(len(part) for part in encoded)
        return DeltaOffer(base.manifest.version, base.manifest.life, base.manifest.checksum, sizes)

    async def _drop(self, key: tuple[int, int]) -> None:
        if self._node is not None:
            for is_delta in (False, True):
                self._node.drop(Content(self._token, *key, is_delta))

    async def attach(self, replica: str, published: PublishedWeights) -> None:
        """Ask the publisher whether it holds the version.

        Raises:
            ServiceError: another transport, no answer, or the version is retired.
        """
        self._check_open()
        self._check_transport(replica, published)
        locator = ZmqLocator.of(published)
        name, boot_id = here()
        if boot_id != locator.boot_id and is_local(split_key(locator.origin.address)[0]):
            raise self._error(
                f"replica {replica!r} runs on host {name!r}, the weights are offered on host "
                f"{locator.host!r} only; let the option 'listen' name an interface"
            )
        node = self._trusting(locator)
        manifest = published.manifest
        content = Content(locator.origin.token, manifest.version, manifest.life, False)
        has = await in_thread(node.has, content, locator.origin, self._options.stall_s)
        if not has:
            why = "its publisher does not answer" if has is None else "it is retired"
            raise self._error(f"replica {replica!r} cannot get version {manifest.version}: {why}")

    async def fetch(self, published: PublishedWeights) -> WeightSource:
        """Buckets come as they land; the pull begins when the first is asked for.

        A version that is fetched again comes whole and from the publisher, whatever is here.

        Raises:
            DataError: the locator is not sound.
        """
        self._check_open()
        locator = ZmqLocator.of(published)
        node = self._trusting(locator)
        return WeightSource(published.manifest, self._buckets(node, published.manifest, locator))

    async def _buckets(
        self, node: Node, manifest: WeightManifest, locator: ZmqLocator
    ) -> AsyncIterator[Bucket]:
        specs = [place.specs(manifest.tensors) for place in locator.buckets]
        origin = locator.origin.token
        full = Content(origin, manifest.version, manifest.life, False)
        again = full in self._pulled
        await self._forget_others(node, full)
        updated = None if again else await self._from_delta(node, manifest, locator, specs)
        if updated is not None:
            self._bases[origin] = _Base(manifest, updated)
            for bucket in updated:
                self._fetched += sum(spec.nbytes for spec in bucket.specs)
                yield bucket
            return
        room = [self._pool.take(place.nbytes) for place in locator.buckets]
        self._pool.trim()
        pull, taken = _Landing(node, full, room, locator.origin), []
        del room
        for number, here_specs in enumerate(specs):
            taken.append(Bucket(here_specs, await pull.buffer(number, self._check_open)))
            self._fetched += sum(spec.nbytes for spec in here_specs)
            yield taken[-1]
        if self._options.delta and await in_thread(_checksum, taken) == manifest.checksum:
            self._bases[origin] = _Base(manifest, taken)

    async def _forget_others(self, node: Node, content: Content) -> None:
        """Keep the version before too, which others may still pull from here."""
        self._pulled.pop(content, None)
        self._pulled[content] = None
        same = [known for known in self._pulled if known.origin == content.origin]
        past = [known for known in self._pulled if known.life < content.life]
        for old in {*same[:-2], *past}:
            del self._pulled[old]
            if old in past:
                self._bases.pop(old.origin, None)
            node.drop(old)
            node.drop(old._replace(is_delta=True))
        await in_thread(node.settle)  # its memory can be used again from here on

    async def _from_delta(
        self,
        node: Node,
        manifest: WeightManifest,
        locator: ZmqLocator,
        specs: Sequence[tuple[TensorSpec, ...]],
    ) -> list[Bucket] | None:
        """The new version from the one that is here; None if it must come whole."""
        origin = locator.origin.token
        offer, base = locator.delta, self._bases.get(origin)
        if offer is None or base is None:
            return None
        ours = (base.manifest.version, base.manifest.life, base.manifest.checksum)
        if ours != (offer.version, offer.life, offer.checksum):
            return None
        content = Content(origin, manifest.version, manifest.life, True)
        room = [np.empty(size, np.uint8) for size in offer.sizes]
        pull = _Landing(node, content, room, locator.origin)
        made = []
        try:
            for number, old in enumerate(base.buckets):
                change = await pull.buffer(number, self._check_open)
                data = await in_thread(delta.apply, old.data, change, specs[number])
                made.append(Bucket(specs[number], data))
            if await in_thread(_checksum, made) != manifest.checksum:
                raise DataError("the result has another checksum")
        except DataError as error:
            _log.warning("delta to version %d is of no use: %s", manifest.version, error)
            self._bases.pop(origin, None)
            return None
        return made

    async def stats(self) -> WeightSyncStats:
        """Versions held, bytes moved."""
        self._check_open()
        node = self._node
        return WeightSyncStats(
            self._version_numbers(),
            self._published,
            self._fetched,
            node.bytes_sent if node else 0,
            node.bytes_received if node else 0,
        )


class _Landing:
    """A pull as the event loop sees it."""

    def __init__(
        self, node: Node, content: Content, room: Sequence[NDArray[np.uint8]], origin: Origin
    ) -> None:
        self._content = content
        self._held = Held(room)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        node.pull(content, self._held, origin, self._notify)

    def _notify(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._changed.set)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    async def buffer(self, number: int, check_open: Callable[[], None]) -> NDArray[np.uint8]:
        """A buffer, once it is whole.

        Raises:
            PeerLostError: it will not come.
        """
        while not self._held.has_buffer(number):
            if self._held.failed:
                check_open()
                raise PeerLostError(
                    f"version {self._content.version} did not come: {self._held.failed}",
                    service="weight_sync",
                )
            self._changed.clear()
            if not self._held.has_buffer(number) and not self._held.failed:
                await self._changed.wait()
        return self._held.buffers[number]


def _checksum(buckets: Sequence[Bucket]) -> str:
    checksum = Checksum()
    for bucket in buckets:
        for spec in bucket.specs:
            checksum.add(spec.name, spec.dtype, spec.shape, bucket.tensor_bytes(spec))
    return checksum.hexdigest()
