"""WeightSync: moves a version's bytes from the trainer to the replicas.

It has two sides that meet through serializable records: the trainer's process calls `publish`,
every replica's process calls `attach` and `fetch`. The protocol around it (stage, verify, confirm,
commit) is `asyncflow_core.flow.weights.protocol`. `docs/spec/weight_sync.md` numbers what every
implementation must hold (WS-n). Longer than most modules: these records are one vocabulary, which
trainers, transports and rollouts import from one place.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncflow_core.errors import DataError
from asyncflow_core.services.base import Service

__all__ = [
    "DTYPE_BYTES",
    "Bucket",
    "Checksum",
    "ManifestBuilder",
    "PublishedWeights",
    "SupportsOverlappedFetch",
    "TensorSpec",
    "WeightManifest",
    "WeightPart",
    "WeightSource",
    "WeightSync",
    "WeightSyncCapabilities",
    "WeightSyncStats",
    "check_bucket",
    "check_tensors",
]

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes an element, by dtype as safetensors spells it."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor inside a bucket.

    Attributes:
        name: in the Hugging Face layout.
        dtype: as safetensors spells it, a key of `DTYPE_BYTES`.
        shape: sizes.
        offset: first byte in its bucket.
        aliases: further names of the same tensor (tied weights).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        if self.dtype not in DTYPE_BYTES:
            raise DataError(
                f"tensor {self.name!r} has the dtype {self.dtype!r}; allowed: {list(DTYPE_BYTES)}"
            )
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Tensors in one buffer.

    Attributes:
        specs: what lies where in `data`.
        data: uint8 [bytes]; valid until the next bucket is asked for.
    """

    specs: tuple[TensorSpec, ...]
    data: NDArray[np.uint8]

    def tensor_bytes(self, spec: TensorSpec) -> NDArray[np.uint8]:
        """The bytes of one tensor, a view."""
        return self.data[spec.offset : spec.offset + spec.nbytes]


_CHUNK_BYTES = 1 << 20
"""What is copied and then counted while a core's cache may still hold it. Smaller pieces are copied
by instructions that take up to 1.7 times as long where the copy does not begin at a multiple of 64
(measured: 0.18 s a GB for 0.106)."""


class Checksum:
    """XXH3-64 of each tensor's bytes, with its name, dtype and shape, summed over all tensors.

    The trainer computes it over what it exports, a replica over what really lies in its memory.
    A sum, so that it depends on neither buckets nor order, and that of the parts of a version
    which several ranks export is that of the whole. It finds damage, not an attacker.
    """

    def __init__(self) -> None:
        """Start with no tensor."""
        self._parts: dict[str, int] = {}

    def add(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        data: Any,
        *,
        into: NDArray[np.uint8] | None = None,
    ) -> None:
        """Count one tensor; `data` is any contiguous buffer. A name counts once.

        Args:
            name: as in its spec.
            dtype: as in its spec.
            shape: as in its spec.
            data: the tensor's bytes.
            into: memory of that size that takes a copy; what then lies there is counted.
        """
        digest = xxhash.xxh3_64()
        # np.copyto lets other threads run; assigning to a memoryview would not.
        source: Any = np.frombuffer(data, np.uint8) if memoryview(data).nbytes else b""
        if into is None:
            digest.update(source)
        else:
            for start in range(0, len(source), _CHUNK_BYTES):
                chunk: Any = into[start : start + _CHUNK_BYTES]
                np.copyto(chunk, source[start : start + _CHUNK_BYTES])
                digest.update(chunk)
        line = f"{name}\0{dtype}\0{shape}\0".encode() + digest.digest()
        self._parts[name] = xxhash.xxh3_64_intdigest(line)

    def hexdigest(self) -> str:
        """16 hex digits."""
        return f"{sum(self._parts.values()) % (1 << 64):016x}"

    @staticmethod
    def combined(parts: Iterable[str]) -> str:
        """The checksum of a whole, from those of its disjoint parts."""
        return f"{sum(int(part, 16) for part in parts) % (1 << 64):016x}"


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """What a version consists of.

    Attributes:
        version: completed steps.
        life: which life of the run made it; a resume starts a new one.
        tensors: every tensor once, without offsets.
        checksum: of all of them, by `Checksum`.
        nbytes: of all of them.
    """

    version: int
    life: int
    tensors: tuple[TensorSpec, ...]
    checksum: str
    nbytes: int


class ManifestBuilder:
    """Makes a version's manifest while its buckets pass by; for transports."""

    def __init__(self, version: int, life: int) -> None:
        """Start without a tensor."""
        self._version, self._life = version, life
        self._tensors: dict[str, TensorSpec] = {}
        self._checksum = Checksum()

    def add(self, bucket: Bucket, *, into: NDArray[np.uint8] | None = None) -> None:
        """Count a bucket; `DataError` for a tensor outside its buffer or seen before.

        Args:
            bucket: what passes by.
            into: memory of its size, or more, that takes a copy of its tensors.
        """
        check_bucket(bucket)
        for spec in bucket.specs:
            if spec.name in self._tensors:
                raise DataError(f"version {self._version} has the tensor {spec.name!r} twice")
            self._tensors[spec.name] = replace(spec, offset=0)
            self._checksum.add(
                spec.name,
                spec.dtype,
                spec.shape,
                bucket.tensor_bytes(spec),
                into=None if into is None else into[spec.offset : spec.offset + spec.nbytes],
            )

    @staticmethod
    def check_once(version: int, tensors: Iterable[TensorSpec]) -> None:
        """`DataError` naming the first tensor that is there twice."""
        seen: set[str] = set()
        for spec in tensors:
            if spec.name in seen:
                raise DataError(f"version {version} has the tensor {spec.name!r} twice")
            seen.add(spec.name)

    def build(self) -> WeightManifest:
        """The manifest of all buckets added."""
        tensors = tuple(self._tensors.values())
        nbytes = sum(spec.nbytes for spec in tensors)
        return WeightManifest(
            self._version, self._life, tensors, self._checksum.hexdigest(), nbytes
        )


def check_bucket(bucket: Bucket) -> None:
    """`DataError` for a tensor that does not lie inside the bucket's buffer."""
    for spec in bucket.specs:
        if spec.offset < 0 or spec.offset + spec.nbytes > len(bucket.data):
            raise DataError(
                f"tensor {spec.name!r} lies at bytes {spec.offset} to {spec.offset + spec.nbytes} "
                f"of a bucket of {len(bucket.data)}"
            )


def check_tensors(found: Iterable[TensorSpec], expected: Iterable[TensorSpec]) -> None:
    """`DataError` naming the first difference in names, shapes or dtypes; for rollouts.

    Args:
        found: of a manifest or a file.
        expected: of the model that takes them in.
    """
    theirs, ours = {spec.name: spec for spec in found}, {spec.name: spec for spec in expected}
    for name in sorted(theirs.keys() | ours.keys()):
        if name not in theirs:
            raise DataError(f"the model's tensor {name!r} is missing from the weights")
        if name not in ours:
            raise DataError(f"the weights have the tensor {name!r}, which the model has not")
        got, want = theirs[name], ours[name]
        if (got.dtype, tuple(got.shape)) != (want.dtype, tuple(want.shape)):
            raise DataError(
                f"tensor {name!r} is {got.dtype} {list(got.shape)} in the weights, "
                f"{want.dtype} {list(want.shape)} in the model"
            )


@dataclass(frozen=True, slots=True)
class WeightPart:
    """What one of several trainer ranks yields of a version.

    Attributes:
        rank: of the trainer.
        manifest: its tensors.
        locator: where they are, in the transport's own words.
    """

    rank: int
    manifest: WeightManifest
    locator: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A version others can fetch.

    Attributes:
        manifest: what it consists of.
        transport: plugin name that published it.
        locator: where it is, in the transport's own words (msgpack-able); empty with `parts`.
        wall_s: seconds publishing took.
        parts: which rank yields what, where several do; `split` makes each fetchable.
    """

    manifest: WeightManifest
    transport: str
    locator: dict[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0
    parts: tuple[WeightPart, ...] = ()

    @classmethod
    def merged(cls, by_rank: Mapping[int, PublishedWeights]) -> PublishedWeights:
        """One version from what its ranks published; `DataError` if a tensor comes twice."""
        pieces = list(by_rank.values())
        first = pieces[0]
        if len(pieces) == 1:
            return first
        tensors = tuple(spec for piece in pieces for spec in piece.manifest.tensors)
        ManifestBuilder.check_once(first.manifest.version, tensors)
        manifest = WeightManifest(
            first.manifest.version,
            first.manifest.life,
            tensors,
            Checksum.combined(piece.manifest.checksum for piece in pieces),
            sum(piece.manifest.nbytes for piece in pieces),
        )
        parts = tuple(WeightPart(r, piece.manifest, piece.locator) for r, piece in by_rank.items())
        wall_s = max(piece.wall_s for piece in pieces)
        return cls(manifest, first.transport, {}, wall_s, parts)

    def split(self) -> tuple[PublishedWeights, ...]:
        """What a transport can fetch: this, or each rank's part."""
        if not self.parts:
            return (self,)
        return tuple(PublishedWeights(p.manifest, self.transport, p.locator) for p in self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class WeightSource:
    """What `Rollout.stage_weights` takes in: exactly one of `buckets`, `path`, `collective`.

    Attributes:
        manifest: what will come.
        buckets: the bytes, bucket by bucket.
        path: a directory of safetensors files.
        collective: how to join a group that broadcasts them.
    """

    manifest: WeightManifest
    buckets: AsyncIterator[Bucket] | None = None
    path: str | None = None
    collective: Mapping[str, Any] | None = None

    @property
    def kind(self) -> str:
        """Which of the three it is."""
        kinds = [k for k in ("buckets", "path", "collective") if getattr(self, k) is not None]
        if len(kinds) != 1:
            raise DataError(f"a weight source is one of buckets, path, collective; got {kinds}")
        return kinds[0]

    @classmethod
    def joined(cls, manifest: WeightManifest, sources: Sequence[WeightSource]) -> WeightSource:
        """The buckets of several sources, one after another, as one source.

        Raises:
            DataError: there are several, and one of them is not of buckets.
        """
        if len(sources) == 1:
            return sources[0]
        kinds = {source.kind for source in sources}
        if kinds != {"buckets"}:
            raise DataError(f"parts of a version can only be joined as buckets, got {kinds}")

        async def chained() -> AsyncIterator[Bucket]:
            for source in sources:
                assert source.buckets is not None
                async for bucket in source.buckets:
                    yield bucket

        return cls(manifest, chained())


@dataclass(frozen=True, slots=True)
class WeightSyncStats:
    """Versions held and bytes moved by this side.

    Attributes:
        versions: held.
        bytes_published, bytes_fetched: of the models.
        bytes_sent, bytes_received: that crossed a network; fewer than a model's with deltas.
    """

    versions: tuple[int, ...] = ()
    bytes_published: int = 0
    bytes_fetched: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True, slots=True)
class WeightSyncCapabilities:
    """What a transport can do.

    Attributes:
        localities: where the two sides may be: "process", "host", "network".
        source: what `fetch` gives a replica: "buckets", "path" or "collective".
        concurrent_versions: versions that can be held at once.
        overlapped_fetch: it is a `SupportsOverlappedFetch`.
    """

    localities: frozenset[str] = frozenset({"process", "host"})
    source: str = "buckets"
    concurrent_versions: int = 2
    overlapped_fetch: bool = False


class WeightSync(Service):
    """One side of a transport. It owns the memory or files of what it published."""

    API_VERSION: ClassVar[int] = 1

    @abstractmethod
    async def publish(
        self, version: int, life: int, buckets: AsyncIterator[Bucket]
    ) -> PublishedWeights:
        """Take a version's buckets and make it fetchable; all of it, or an error and nothing.

        Waits while `concurrent_versions` are held and none is retired.
        """

    @abstractmethod
    async def attach(self, replica: str, published: PublishedWeights) -> None:
        """Make this side, a replica's, able to fetch: checks locality and access.

        Raises:
            ServiceError: what was published is out of reach from here, with the reason.
        """

    @abstractmethod
    async def fetch(self, published: PublishedWeights) -> WeightSource:
        """What to hand to `Rollout.stage_weights`."""

    @abstractmethod
    async def retire(self, version: int, life: int = 0) -> None:
        """No replica will fetch this version again; its memory may be used for another."""

    @abstractmethod
    async def stats(self) -> WeightSyncStats:
        """Versions held, bytes moved."""


@runtime_checkable
class SupportsOverlappedFetch(Protocol):
    """A transport from which replicas take a version in while the trainer still exports it."""

    async def coming(self, version: int, life: int) -> PublishedWeights | None:
        """Of the publishing side: what can be fetched of a version before it has come whole.

        Call it once, while `publish` of the version is awaited. What `fetch` makes of it yields
        buckets as they come and raises if they do not. Its manifest has no checksum, and lists the
        tensors that are expected: only what `publish` returns says what came.

        Returns:
            None where it cannot be told what will come, as of a first version, or `publish` failed.
        """
        ...
