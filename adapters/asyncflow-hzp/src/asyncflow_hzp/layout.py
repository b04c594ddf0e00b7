"""Which rank holds which part: pure arithmetic, no torch.

A unit's parameters are one flat tensor of n elements. Three group sizes (z3, z2, z1) say over how
many neighbouring ranks parameters, gradients and optimizer state are split. The ranks' shards nest:
a shard of the wider split lies inside the rank's shard of every narrower one, so that going from
one layout to another is a single collective over a subgroup.

A rank's place is written in mixed radix. For the sizes a | b | c its digits are p % a,
(p % b) // a and (p % c) // b, and its shard of size n/c starts at their sum, weighted by n/a, n/b
and n/c. Neighbours share the most frequent traffic: size a spans a consecutive ranks.

Source: papers.md B.4 (the paper's rule is not public; this is ours); MiCS and MindSpeed LayerZeRO
for the two-level case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from asyncflow_core.errors import ConfigError

__all__ = ["PRESETS", "Layout", "Piece", "Sizes", "parse_sizes", "valid_sizes"]


class Sizes(NamedTuple):
    """Over how many ranks parameters, gradients and optimizer state are split."""

    z3: int
    z2: int
    z1: int

    def __str__(self) -> str:
        return f"({self.z3},{self.z2},{self.z1})"


class Piece(NamedTuple):
    """The stretch of a flat tensor that a rank holds."""

    rank: int
    start: int
    stop: int


def _presets(world: int, node: int) -> dict[str, Sizes]:
    return {
        "ddp": Sizes(1, 1, 1),
        "zero1": Sizes(1, 1, world),
        "zero2": Sizes(1, world, world),
        "zero3": Sizes(world, world, world),
        "hsdp": Sizes(node, node, node),
        "hpz": Sizes(node, node, world),
    }


PRESETS = tuple(_presets(1, 1))
"""Names of the special cases; hsdp and hpz split parameters inside a node only."""


def parse_sizes(value: object, *, world: int, node: int) -> Sizes:
    """Sizes from a preset's name or three numbers, checked against the world.

    Raises:
        ConfigError: they are no valid sizes.
    """
    if isinstance(value, str):
        if value not in PRESETS:
            raise ConfigError(f"no sharding {value!r}; give one of {', '.join(PRESETS)}, or three")
        return _presets(world, node)[value]
    numbers = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(numbers) == 4:
        raise ConfigError(
            f"sharding {value!r} has four sizes, three are allowed: one z3 serves forward and "
            f"backward; (zb, z2, z1) with zb the backward's holds as much and sends no more"
        )
    if len(numbers) != 3 or not all(isinstance(n, int) and n > 0 for n in numbers):
        raise ConfigError(f"sharding {value!r} is not three group sizes (z3, z2, z1)")
    sizes = Sizes(*numbers)
    fault = _fault(sizes, world)
    if fault:
        raise ConfigError(f"sharding {sizes} does not fit {world} ranks: {fault}")
    return sizes


def _fault(sizes: Sizes, world: int) -> str:
    z3, z2, z1 = sizes
    if world % z1:
        return f"z1 = {z1} must divide {world}"
    if z1 % z2 or z1 % z3:
        return f"z2 = {z2} and z3 = {z3} must divide z1 = {z1}"
    if z2 % z3 and z3 % z2:
        return f"one of z3 = {z3} and z2 = {z2} must divide the other"
    return ""


def valid_sizes(world: int) -> Iterator[Sizes]:
    """Every tuple that fits, the least sharded first."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    for z1 in divisors:
        for z2 in divisors:
            for z3 in divisors:
                if not _fault(Sizes(z3, z2, z1), world):
                    yield Sizes(z3, z2, z1)


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes on a list of ranks, from the point of view of one of them.

    Attributes:
        sizes: group sizes.
        ranks: global ranks that hold copies of the same parameters, neighbours first.
        place: index of this rank in `ranks`.
    """

    sizes: Sizes
    ranks: tuple[int, ...]
    place: int

    def padded(self, elements: int, *, align: int = 16) -> int:
        """Length that every shard divides into aligned stretches."""
        step = self.sizes.z1 * align
        return -(-elements // step) * step

    def shard(self, level: int, elements: int, place: int | None = None) -> tuple[int, int]:
        """Start and stop of a place's shard in a split over `level` ranks (one of the sizes)."""
        at = self.place if place is None else place
        start, below = 0, 1
        for size in sorted({*self.sizes, 1}):
            if size > level:
                break
            start += (at % size) // below * (elements // size)
            below = size
        return start, start + elements // level

    def group(self, outer: int, inner: int = 1) -> tuple[int, ...]:
        """Places that share this place's shard of `inner` and split it on over `outer` ranks."""
        first = self.place // outer * outer
        return tuple(p for p in range(first, first + outer) if p % inner == self.place % inner)

    def pieces(self, outer: int, inner: int, elements: int) -> tuple[Piece, ...]:
        """What each member of `group(outer, inner)` holds of a flat tensor, in rank order."""
        return tuple(
            Piece(self.ranks[p], *self.shard(outer, elements, p)) for p in self.group(outer, inner)
        )

    @property
    def replicas(self) -> tuple[int, ...]:
        """Global ranks with the very same optimizer shard."""
        z1 = self.sizes.z1
        return tuple(self.ranks[p] for p in range(self.place % z1, len(self.ranks), z1))

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank speaks for its shard, so that each is counted once."""
        return self.place < self.sizes.z1
