"""Where a version published over ZeroMQ is, in words that travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncflow_core.errors import DataError
from asyncflow_core.services.weight_sync import Bucket, PublishedWeights
from asyncflow_core.wire import KEY_BYTES, KeyPair, check_reach, split_key
from asyncflow_weights_host.locator import BucketPlace, check_places, places_of, places_to_plain
from asyncflow_weights_host.node import Origin
from asyncflow_weights_host.protocol import TOKEN_BYTES

__all__ = ["DeltaOffer", "ZmqLocator", "places_in"]


@dataclass(frozen=True, slots=True)
class DeltaOffer:
    """A shorter way for whoever has the base.

    Attributes:
        version, life, checksum: of the base.
        sizes: bytes of each bucket's delta.
    """

    version: int
    life: int
    checksum: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ZmqLocator:
    """Where a version is.

    Attributes:
        host, boot_id: the publisher's machine.
        origin: its node.
        buckets: sizes and tensors.
        delta: from the version before, if there is one.
    """

    host: str
    boot_id: str
    origin: Origin
    buckets: tuple[BucketPlace, ...]
    delta: DeltaOffer | None

    def to_dict(self) -> dict[str, Any]:
        """For `PublishedWeights.locator`."""
        offer = self.delta
        return {
            "host": self.host,
            "boot_id": self.boot_id,
            "address": self.origin.address,
            "token": self.origin.token,
            "client": [self.origin.keys.public, self.origin.keys.secret],
            "buckets": places_to_plain(self.buckets),
            "delta": offer and [offer.version, offer.life, offer.checksum, list(offer.sizes)],
        }

    @classmethod
    def of(cls, published: PublishedWeights) -> ZmqLocator:
        """From `PublishedWeights.locator`; `DataError` if it is not one."""
        fields = published.locator
        try:
            offer = None
            if fields["delta"] is not None:
                version, life, checksum, sizes = fields["delta"]
                offer = DeltaOffer(int(version), int(life), str(checksum), tuple(map(int, sizes)))
            pair = KeyPair(*map(bytes, fields["client"]))
            address = str(fields["address"])
            check_reach(address, bind=False, keys=split_key(address)[1] is not None)
            made = cls(
                str(fields["host"]),
                str(fields["boot_id"]),
                Origin(
                    address,
                    bytes(fields["token"]),
                    pair,
                ),
                places_of(fields["buckets"]),
                offer,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a locator of the transport 'zmq': {error!r}") from error
        check_places(made.buckets, published.manifest.tensors)
        if {len(pair.public), len(pair.secret)} != {KEY_BYTES}:
            raise DataError("a locator's keys have not the size of keys")
        if len(made.origin.token) != TOKEN_BYTES:
            raise DataError(f"a locator's token has {len(made.origin.token)} bytes")
        if offer is not None and (len(offer.sizes) != len(made.buckets) or min(offer.sizes) < 0):
            raise DataError("a locator's delta does not fit its buckets")
        return made


def places_in(buckets: Sequence[Bucket]) -> tuple[BucketPlace, ...]:
    """Of buckets, in their order; tensors are numbered through."""
    places, count = [], 0
    for bucket in buckets:
        tensors = tuple((count + n, spec.offset) for n, spec in enumerate(bucket.specs))
        count += len(tensors)
        places.append(BucketPlace(0, len(bucket.data), tensors))
    return tuple(places)
