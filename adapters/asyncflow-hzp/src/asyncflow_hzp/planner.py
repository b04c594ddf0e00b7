"""Choosing group sizes: every valid tuple, its memory, its bytes, its step time. Pure arithmetic.

An alpha-beta model: a collective over ranks costs a latency and its bytes over the rate of the link
they take. A node's ranks share its link to other nodes. Per unit, traffic hides behind compute or
compute behind traffic, whichever is longer; the first gather and the last reduction of a step hide
behind nothing.

Units: bytes, seconds, bytes a second. Psi is the number of parameters.
Source: papers.md B.4, after AMSP (arXiv 2311.00257); the paper's own rule is not public.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from asyncflow_core.errors import ConfigError
from asyncflow_hzp.layout import Layout, Sizes, valid_sizes

__all__ = ["LinkSpeeds", "Plan", "PlanRow", "Workload", "plan_tuples"]


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """What links do: `intra` between neighbours on a node, `inter` a node's link to the others.

    The defaults are round figures of a node with NVLink and a 400 Gbit/s network; measure yours.
    """

    intra_bytes_s: float = 200e9
    inter_bytes_s: float = 50e9
    intra_latency_s: float = 20e-6
    inter_latency_s: float = 50e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One optimizer step.

    Attributes:
        elements: of each unit, in the order of the forward.
        param_bytes, reduce_bytes, master_bytes: of one element.
        moments: optimizer state tensors an element; 2 for AdamW.
        trained: whether there are gradients, moments and a backward.
        micro_batches: of a step, on each rank.
        compute_s: of all of them, forward and backward.
        slots, grad_buffers: gathered units and full gradients held at a time.
        accumulate_full: micro-batches add up before they are reduced.
    """

    elements: tuple[int, ...]
    param_bytes: int = 2
    reduce_bytes: int = 4
    master_bytes: int = 4
    moments: int = 2
    trained: bool = True
    micro_batches: int = 1
    compute_s: float = 0.0
    slots: int = 3
    grad_buffers: int = 2
    accumulate_full: bool = True


@dataclass(frozen=True, slots=True)
class PlanRow:
    """What one tuple costs a rank.

    Attributes:
        memory_bytes: parameters, gradients, optimizer state, buffers; no activations.
        intra_bytes, inter_bytes: sent a step.
        traffic_s: on the link, were nothing hidden. step_s: with compute.
        fits: within the memory budget.
    """

    sizes: Sizes
    memory_bytes: int
    intra_bytes: int
    inter_bytes: int
    traffic_s: float
    step_s: float
    fits: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """All tuples, the fastest that fits first."""

    rows: tuple[PlanRow, ...]

    @property
    def best(self) -> PlanRow:
        """The choice of "auto".

        Raises:
            ConfigError: nothing fits.
        """
        if not self.rows[0].fits:
            least = min(self.rows, key=lambda row: row.memory_bytes)
            raise ConfigError(
                f"no sharding fits the memory budget; {least.sizes} needs least, "
                f"{least.memory_bytes / 1e9:.2f} GB a rank"
            )
        return self.rows[0]

    def __str__(self) -> str:
        """A table for people."""
        lines = ["z3,z2,z1         memory MB   intra MB   inter MB   traffic s    step s"]
        lines.extend(
            f"{row.sizes!s:<14} {row.memory_bytes / 1e6:11.1f} {row.intra_bytes / 1e6:10.1f} "
            f"{row.inter_bytes / 1e6:10.1f} {row.traffic_s:11.4f} {row.step_s:9.4f}"
            f"{'' if row.fits else '  over budget'}"
            for row in self.rows
        )
        return "\n".join(lines)


@dataclass(slots=True)
class _Traffic:
    """Sent by one rank: bytes by link, and seconds."""

    speeds: LinkSpeeds
    node: int
    intra: float = 0.0
    inter: float = 0.0
    seconds: float = 0.0

    def send(self, places: Sequence[int], me: int, nbytes: float) -> float:
        """Each of the others gets `nbytes` from this place, as `exchange` does it; the seconds."""
        nodes = Counter(place // self.node for place in places)
        near, far = nodes[me // self.node] - 1, len(places) - nodes[me // self.node]
        if len(set(nodes.values())) == 1:
            # A piece crosses between two nodes once, then goes on to the neighbours.
            near, far = near * len(nodes), len(nodes) - 1
        seconds = 0.0
        if near and nbytes:
            self.intra += near * nbytes
            seconds += self.speeds.intra_latency_s + near * nbytes / self.speeds.intra_bytes_s
        if far and nbytes:
            self.inter += far * nbytes
            share = self.speeds.inter_bytes_s / self.node
            seconds += self.speeds.inter_latency_s + far * nbytes / share
        self.seconds += seconds
        return seconds


def plan_tuples(
    work: Workload,
    *,
    world: int,
    node_size: int,
    speeds: LinkSpeeds | None = None,
    memory_bytes: int | None = None,
) -> Plan:
    """Cost every valid tuple; the fastest that fits first, of equals the one with least memory."""
    rows = [
        _row(work, sizes, world, node_size, speeds or LinkSpeeds(), memory_bytes)
        for sizes in valid_sizes(world)
    ]
    rows.sort(key=lambda row: (not row.fits, round(row.step_s, 9), row.memory_bytes))
    return Plan(tuple(rows))


def _row(
    work: Workload,
    sizes: Sizes,
    world: int,
    node: int,
    speeds: LinkSpeeds,
    budget: int | None,
) -> PlanRow:
    traffic = _Traffic(speeds, node)
    step = _step(work, Layout(sizes, tuple(range(world)), 0), traffic)
    memory = _memory(work, sizes)
    fits = budget is None or memory <= budget
    return PlanRow(
        sizes, memory, round(traffic.intra), round(traffic.inter), traffic.seconds, step, fits
    )


def _memory(work: Workload, sizes: Sizes) -> int:
    total, largest = sum(work.elements), sorted(work.elements, reverse=True)
    z3, z2, z1 = sizes
    held = work.param_bytes * total / z3
    # Where both have one dtype the optimizer's weights are part of the parameters.
    masters = 0.0 if work.param_bytes == work.master_bytes else work.master_bytes * total / z1
    state = masters + (1 + work.moments) * work.master_bytes * total / z1
    sums = 0.0
    if work.micro_batches > 1 and z1 > 1:
        sums = work.reduce_bytes * total / (1 if work.accumulate_full else z2)
    slots = work.param_bytes * sum(largest[: work.slots]) if z3 > 1 else 0
    if not work.trained:
        return round(held + slots)
    buffers = work.reduce_bytes * largest[0] * (work.grad_buffers + 1) if z1 > 1 else 0
    return round(held + state + sums + slots + buffers)


def _step(work: Workload, layout: Layout, traffic: _Traffic) -> float:
    """Seconds of a step: per unit the longer of traffic and compute."""
    total = sum(work.elements)
    if not work.trained:
        return sum(
            max(work.compute_s * n / total, _gather(work, layout, traffic, n))
            for n in work.elements
        )
    seconds = exposed = 0.0
    for micro in range(work.micro_batches):
        last = micro == work.micro_batches - 1
        for number, elements in enumerate(work.elements):
            compute = work.compute_s / work.micro_batches * elements / total
            gathers = [_gather(work, layout, traffic, elements) for _ in range(2)]
            reduce = _reduce(work, layout, traffic, elements, last=last)
            if number == 0:
                exposed += gathers[0] if micro == 0 else 0.0
                exposed += reduce if last else 0.0
            seconds += max(compute / 3, gathers[0])
            seconds += max(compute * 2 / 3, gathers[1] + reduce)
    publish = sum(_publish(work, layout, traffic, elements) for elements in work.elements)
    hidden = min(publish, work.compute_s / 3) if layout.sizes.z3 == 1 else 0.0
    return seconds + (exposed if work.compute_s else 0.0) + publish - hidden


def _gather(work: Workload, layout: Layout, traffic: _Traffic, elements: int) -> float:
    z3 = layout.sizes.z3
    return traffic.send(layout.group(z3), 0, work.param_bytes * elements / z3)


def _reduce(
    work: Workload, layout: Layout, traffic: _Traffic, elements: int, *, last: bool
) -> float:
    _, z2, z1 = layout.sizes
    if not last and work.accumulate_full:
        return 0.0
    seconds = traffic.send(layout.group(z2), 0, work.reduce_bytes * elements / z2)
    if last:
        seconds += traffic.send(layout.group(z1, z2), 0, work.reduce_bytes * elements / z1)
        copies = len(layout.replicas)
        piece = work.master_bytes * elements / z1 / copies
        for _ in range(2):
            seconds += traffic.send(layout.replicas, 0, piece)
    return seconds


def _publish(work: Workload, layout: Layout, traffic: _Traffic, elements: int) -> float:
    z3, _, z1 = layout.sizes
    return traffic.send(layout.group(z1, z3), 0, work.param_bytes * elements / z1)
