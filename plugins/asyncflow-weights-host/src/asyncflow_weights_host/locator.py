"""Where a version lies, in words that travel, and whether it can be reached from here."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asyncflow_core.errors import DataError
from asyncflow_core.services.weight_sync import PublishedWeights, TensorSpec

__all__ = ["BucketPlace", "Locator", "check_places", "here", "places_of", "places_to_plain"]


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

    def specs(self, tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The tensors of the bucket with their offsets in it."""
        return tuple(replace(tensors[number], offset=offset) for number, offset in self.tensors)


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
        return {**asdict(self), "buckets": places_to_plain(self.buckets)}

    @classmethod
    def of(cls, published: PublishedWeights) -> Locator:
        """From `PublishedWeights.locator`.

        Raises:
            DataError: it is not one, or points outside the file or the manifest.
        """
        fields = published.locator
        try:
            made = cls(
                str(fields["host"]),
                str(fields["boot_id"]),
                str(fields["path"]),
                int(fields["nbytes"]),
                places_of(fields["buckets"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a locator of the transport 'host': {error!r}") from error
        check_places(made.buckets, published.manifest.tensors)
        for place in made.buckets:
            if place.offset + place.nbytes > made.nbytes:
                raise DataError(f"a bucket of {made.path} lies outside its {made.nbytes} bytes")
        return made


def places_of(given: Any) -> tuple[BucketPlace, ...]:
    """From plain values; `KeyError`, `TypeError` or `ValueError` if they are not places."""
    return tuple(
        BucketPlace(
            int(place["offset"]),
            int(place["nbytes"]),
            tuple((int(number), int(offset)) for number, offset in place["tensors"]),
        )
        for place in given
    )


def places_to_plain(places: Sequence[BucketPlace]) -> list[dict[str, Any]]:
    """In lists: msgpack has no tuples."""
    return [{**asdict(place), "tensors": [list(t) for t in place.tensors]} for place in places]


def check_places(places: Sequence[BucketPlace], tensors: Sequence[TensorSpec]) -> None:
    """`DataError` unless every tensor is placed once, inside its bucket."""
    numbers = sorted(number for place in places for number, _ in place.tensors)
    if numbers != list(range(len(tensors))):
        raise DataError(
            f"a locator places {len(numbers)} tensors, its manifest has {len(tensors)}; each must "
            f"be placed once"
        )
    for place in places:
        if place.offset < 0 or place.nbytes < 0:
            raise DataError(f"a bucket lies at {place.offset} and has {place.nbytes} bytes")
        for number, offset in place.tensors:
            if offset < 0 or offset + tensors[number].nbytes > place.nbytes:
                raise DataError(f"tensor {tensors[number].name!r} lies outside its bucket")


def here() -> tuple[str, str]:
    """This machine's name and boot id; the name stands for both where there is no boot id."""
    name = socket.gethostname()
    try:
        return name, Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return name, name
