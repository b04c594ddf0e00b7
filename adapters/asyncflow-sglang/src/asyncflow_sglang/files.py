"""Staged weights as safetensors files, which servers read themselves or are sent from. Blocking."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.errors import DataError
from asyncflow_core.services.weight_sync import (
    Bucket,
    Checksum,
    TensorSpec,
    WeightManifest,
    check_bucket,
    check_tensors,
)

__all__ = [
    "Held", "Writer", "batches", "expected_tensors", "held_model", "link_files", "renamed",
]  # fmt: skip

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
_SHARD_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Held:
    """A version in files of this rollout's own.

    Attributes:
        version: as published.
        path: directory of the files.
        tensors: by the name under which the server knows them; offsets are into `file_of`.
        file_of: file of each name.
        checksum: over the bytes of the files, with the names and shapes of the manifest.
        nbytes: of the tensors.
        borrowed: the files are not ours to remove.
    """

    version: int
    path: Path
    tensors: Mapping[str, TensorSpec]
    file_of: Mapping[str, Path]
    checksum: str
    nbytes: int
    borrowed: bool = False

    def read(self, name: str) -> NDArray[np.uint8]:
        """A tensor's bytes, mapped read-only."""
        spec = self.tensors[name]
        if not spec.nbytes:
            return np.empty(0, np.uint8)
        return np.memmap(self.file_of[name], np.uint8, "r", spec.offset, (spec.nbytes,))

    def remove(self) -> None:
        """Let the version go."""
        if self.borrowed:
            return
        shutil.rmtree(self.path, ignore_errors=True)


def expected_tensors(model: str) -> list[TensorSpec]:
    """Names, shapes and dtypes of the model's own files; `DataError` if one is not sound."""
    return [spec for file in _files(Path(model)) for spec in _header(file)]


def held_model(model: str) -> Held:
    """The model's own files, as version 0; `DataError` if one is not sound."""
    tensors: dict[str, TensorSpec] = {}
    file_of: dict[str, Path] = {}
    for file in _files(Path(model)):
        for spec in _header(file):
            tensors[spec.name], file_of[spec.name] = spec, file
    config = json.loads((Path(model) / "config.json").read_text("utf-8"))
    if config.get("tie_word_embeddings") and len(tensors) > 1:
        tensors.pop("lm_head.weight", None)  # some list it beside the embedding that it is
    nbytes = sum(spec.nbytes for spec in tensors.values())
    return Held(0, Path(model), tensors, file_of, "", nbytes, borrowed=True)


def _files(directory: Path) -> list[Path]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise DataError(f"there are no *.safetensors in {directory}; was the version retired?")
    return files


def _header(file: Path) -> list[TensorSpec]:
    try:
        with file.open("rb") as content:
            (length,) = _LENGTH.unpack(content.read(_LENGTH.size))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {length} bytes")
            header = json.loads(content.read(length))
        header.pop("__metadata__", None)
        return [
            TensorSpec(
                name,
                str(entry["dtype"]),
                tuple(map(int, entry["shape"])),
                _LENGTH.size + length + int(entry["data_offsets"][0]),
            )
            for name, entry in header.items()
        ]
    except (OSError, AttributeError, KeyError, TypeError, ValueError, struct.error) as error:
        raise DataError(f"{file} is not a sound safetensors file: {error}") from error


def _known_name(spec: TensorSpec, known: Iterable[str]) -> str:
    """Of a tied tensor's names, the one the model's own files have: servers load that one."""
    names = (spec.name, *spec.aliases)
    known = set(known)
    return next((name for name in names if name in known), spec.name)


def renamed(tensors: Sequence[TensorSpec], expected: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The tensors as the model's files name them.

    Raises:
        DataError: they are not exactly the model's; the first difference is named.
    """
    known = {spec.name for spec in expected}
    # Some files list tied tensors under both names.
    aliases = {alias for spec in tensors for alias in spec.aliases}
    found = [replace(spec, name=_known_name(spec, known)) for spec in tensors]
    names = {spec.name for spec in found}
    check_tensors(
        found, [spec for spec in expected if spec.name in names or spec.name not in aliases]
    )
    return found


class Writer:
    """Takes a version's buckets into files. `finish` or `abort` ends it."""

    def __init__(
        self, root: Path, manifest: WeightManifest, expected: Sequence[TensorSpec]
    ) -> None:
        """Make a directory for the version.

        Raises:
            DataError: the manifest's tensors are not the model's.
        """
        self._manifest = manifest
        self._names = {
            spec.name: new.name
            for spec, new in zip(manifest.tensors, renamed(manifest.tensors, expected), strict=True)
        }
        self._missing = {spec.name: replace(spec, offset=0) for spec in manifest.tensors}
        self._path = Path(tempfile.mkdtemp(prefix=f"v{manifest.version}-", dir=root))
        self._files = 0
        self._waiting: list[tuple[TensorSpec, NDArray[np.uint8]]] = []
        self._bytes = 0

    def add(self, bucket: Bucket) -> None:
        """Take a bucket; `DataError` for a tensor that was not announced or came before."""
        check_bucket(bucket)
        for spec in bucket.specs:
            announced = self._missing.pop(spec.name, None)
            if announced is None or replace(spec, offset=0) != announced:
                raise DataError(
                    f"a bucket has the tensor {spec}, the manifest announced {announced}"
                )
            data = bucket.tensor_bytes(spec).copy()
            self._waiting.append((replace(spec, name=self._names[spec.name]), data))
            self._bytes += len(data)
        if self._bytes >= _SHARD_BYTES:
            self._write()

    def _write(self) -> None:
        if not self._waiting:
            return
        self._files += 1
        header, at = {}, 0
        for spec, data in self._waiting:
            header[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [at, at + len(data)],
            }
            at += len(data)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (self._path / f"model-{self._files:05}.safetensors").open("wb") as file:
            file.write(_LENGTH.pack(len(text)) + text)
            for _, data in self._waiting:
                file.write(data.data)
        self._waiting, self._bytes = [], 0

    def finish(self) -> Held:
        """What lies in the files now.

        Raises:
            DataError: a tensor did not come.
        """
        if self._missing:
            raise DataError(f"the buckets ended without the tensor {min(self._missing)!r}")
        self._write()
        return _held(self._path, self._manifest, self._names)

    def abort(self) -> None:
        """Leave nothing."""
        shutil.rmtree(self._path, ignore_errors=True)


def link_files(
    root: Path, source: str, manifest: WeightManifest, expected: Sequence[TensorSpec]
) -> Held:
    """Hold the files of a directory, by hard links where its file system is ours, else copies.

    Raises:
        DataError: the files do not have the manifest's tensors, or these are not the model's.
    """
    names = {
        spec.name: new.name
        for spec, new in zip(manifest.tensors, renamed(manifest.tensors, expected), strict=True)
    }
    files = _files(Path(source))
    by_name = {spec.name: replace(spec, aliases=()) for spec in manifest.tensors}
    found = [replace(spec, offset=0) for file in files for spec in _header(file)]
    check_tensors(found, by_name.values())
    if any(name != new for name, new in names.items()):
        raise DataError(
            f"the files in {source} name a tied tensor otherwise than the model's own; publish it "
            f"as {sorted(set(names.values()) - names.keys())}, or let the transport give buckets"
        )
    path = Path(tempfile.mkdtemp(prefix=f"v{manifest.version}-", dir=root))
    try:
        for file in files:
            _link(file, path / file.name)
        return _held(path, manifest, names)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _held(path: Path, manifest: WeightManifest, names: Mapping[str, str]) -> Held:
    tensors: dict[str, TensorSpec] = {}
    file_of: dict[str, Path] = {}
    for file in _files(path):
        for spec in _header(file):
            tensors[spec.name], file_of[spec.name] = spec, file
    held = Held(manifest.version, path, tensors, file_of, "", 0)
    checksum = Checksum()
    for spec in manifest.tensors:
        data = held.read(names[spec.name])
        checksum.add(spec.name, spec.dtype, spec.shape, data)
    nbytes = sum(spec.nbytes for spec in manifest.tensors)
    return replace(held, checksum=checksum.hexdigest(), nbytes=nbytes)


def batches(held: Held, nbytes: int) -> Iterator[list[TensorSpec]]:
    """Its tensors, in lists of at most `nbytes`, or of one."""
    batch: list[TensorSpec] = []
    size = 0
    for spec in held.tensors.values():
        if batch and size + spec.nbytes > nbytes:
            yield batch
            batch, size = [], 0
        batch.append(spec)
        size += spec.nbytes
    if batch:
        yield batch
