"""Where a version lies, in words that travel, and whether it can be reached from here."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asyncflow_core.errors import DataError
from asyncflow_core.services.weight_sync import PublishedWeights, TensorSpec

__all__ = ["BucketPlace", "Locator", "here"]


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """A bucket in the file.

    Attributes:
        offset: first byte.
        nbytes: size.
        tensors: (number in the manifest, offset in the bucket) of each.
    """

    offset: int
    nbytes: int
    tensors: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Locator:
    """Where a version lies.

    Attributes:
        host: name of the machine, for people.
        boot_id: the machine and its start: the same for all its containers.
        path: of the file.
        nbytes: size of the file.
        buckets: in the file.
    """

    host: str
    boot_id: str
    path: str
    nbytes: int
    buckets: tuple[BucketPlace, ...]

    def to_dict(self) -> dict[str, Any]:
        """For `PublishedWeights.locator`, in lists: msgpack has no tuples."""
        buckets = [
            {**asdict(place), "tensors": [list(tensor) for tensor in place.tensors]}
            for place in self.buckets
        ]
        return {**asdict(self), "buckets": buckets}

    @classmethod
    def of(cls, published: PublishedWeights) -> Locator:
        """From `PublishedWeights.locator`.

        Raises:
            DataError: it is not one, or points outside the file or the manifest.
        """
        fields = published.locator
        try:
            buckets = tuple(
                BucketPlace(
                    int(place["offset"]),
                    int(place["nbytes"]),
                    tuple((int(number), int(offset)) for number, offset in place["tensors"]),
                )
                for place in fields["buckets"]
            )
            made = cls(
                str(fields["host"]),
                str(fields["boot_id"]),
                str(fields["path"]),
                int(fields["nbytes"]),
                buckets,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a locator of the transport 'host': {error!r}") from error
        made._check_bounds(published.manifest.tensors)
        return made

    def _check_bounds(self, tensors: Sequence[TensorSpec]) -> None:
        numbers = sorted(number for place in self.buckets for number, _ in place.tensors)
        if numbers != list(range(len(tensors))):
            raise DataError(
                f"the locator of {self.path} places {len(numbers)} tensors, its manifest has "
                f"{len(tensors)}; each must be placed once"
            )
        for place in self.buckets:
            if place.offset < 0 or place.nbytes < 0 or place.offset + place.nbytes > self.nbytes:
                raise DataError(f"a bucket of {self.path} lies outside its {self.nbytes} bytes")
            for number, offset in place.tensors:
                if offset < 0 or offset + tensors[number].nbytes > place.nbytes:
                    raise DataError(f"tensor {tensors[number].name!r} lies outside its bucket")

    def specs(self, place: BucketPlace, tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The tensors of a bucket with their offsets in it."""
        return tuple(replace(tensors[number], offset=offset) for number, offset in place.tensors)


def here() -> tuple[str, str]:
    """This machine's name and boot id; the name stands for both where there is no boot id."""
    name = socket.gethostname()
    try:
        return name, Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return name, name
