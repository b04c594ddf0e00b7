"""WeightSync: moves a version's bytes from the trainer to the replicas.

It has two sides that meet through serializable records: the trainer's process calls `publish`,
every replica's process calls `attach` and `fetch`. The protocol around it (stage, verify, confirm,
commit) is `asyncflow_core.flow.weights`. `docs/spec/weight_sync.md` numbers what every
implementation must hold (WS-n).
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.errors import DataError
from asyncflow_core.services.base import Service

__all__ = [
    "DTYPE_BYTES",
    "Bucket",
    "Checksum",
    "ManifestBuilder",
    "PublishedWeights",
    "TensorSpec",
    "WeightManifest",
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


class Checksum:
    """CRC-32 of each tensor's bytes, combined independently of buckets and their order.

    The trainer computes it over what it exports, a replica over what really lies in its memory.
    """

    def __init__(self) -> None:
        """Start with no tensor."""
        self._parts: dict[str, tuple[str, tuple[int, ...], int]] = {}

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: Any) -> None:
        """Count one tensor; `data` is any contiguous buffer. A name counts once."""
        self._parts[name] = (dtype, tuple(shape), zlib.crc32(memoryview(data).cast("B")))

    def hexdigest(self) -> str:
        """16 hex digits."""
        total = 0
        for name, (dtype, shape, crc) in sorted(self._parts.items()):
            line = f"{name}\0{dtype}\0{shape}\0{crc:08x}\n".encode()
            total = zlib.crc32(line, total & 0xFFFFFFFF) | (zlib.adler32(line, total >> 32) << 32)
        return f"{total:016x}"


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

    def add(self, bucket: Bucket) -> None:
        """Count a bucket; `DataError` for a tensor outside its buffer or seen before."""
        check_bucket(bucket)
        for spec in bucket.specs:
            if spec.name in self._tensors:
                raise DataError(f"version {self._version} has the tensor {spec.name!r} twice")
            self._tensors[spec.name] = replace(spec, offset=0)
            self._checksum.add(spec.name, spec.dtype, spec.shape, bucket.tensor_bytes(spec))

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
class PublishedWeights:
    """A version others can fetch.

    Attributes:
        manifest: what it consists of.
        transport: plugin name that published it.
        locator: where it is, in the transport's own words (msgpack-able).
        wall_s: seconds publishing took.
    """

    manifest: WeightManifest
    transport: str
    locator: dict[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0


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


@dataclass(frozen=True, slots=True)
class WeightSyncStats:
    """Versions held and bytes moved by this side."""

    versions: tuple[int, ...] = ()
    bytes_published: int = 0
    bytes_fetched: int = 0


@dataclass(frozen=True, slots=True)
class WeightSyncCapabilities:
    """What a transport can do.

    Attributes:
        localities: where the two sides may be: "process", "host", "network".
        source: what `fetch` gives a replica: "buckets", "path" or "collective".
        concurrent_versions: versions that can be held at once.
    """

    localities: frozenset[str] = frozenset({"process", "host"})
    source: str = "buckets"
    concurrent_versions: int = 2


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
    async def retire(self, version: int) -> None:
        """No replica will fetch this version again; its memory may be used for another."""

    @abstractmethod
    async def stats(self) -> WeightSyncStats:
        """Versions held, bytes moved."""
