"""The cost model applied to a model and a config, and the links' speeds measured."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
from torch import distributed, nn

from asyncflow_hzp.config import Config
from asyncflow_hzp.links import node_size, world
from asyncflow_hzp.planner import LinkSpeeds, Plan, Workload, plan_tuples
from asyncflow_hzp.units import Cut, cut_units

__all__ = ["measure_links", "plan", "plan_cuts"]

_SHARE = 0.8
"""Of a device's memory, for all but activations, where the user sets no budget."""


def plan(model: nn.Module, config: Config | None = None, *, world_size: int | None = None) -> Plan:
    """What every tuple would cost this model; print it. Touches neither the model nor the ranks.

    Args:
        model: any module; may be on the meta device.
        config: units, dtypes, buffers, `links`, `micro_batches`, `compute_s`, `memory_bytes`.
        world_size: ranks to plan for; None takes those of the process group.
    """
    chosen = config or Config()
    return plan_cuts(cut_units(model, chosen.units), chosen, world_size or world()[1])


def plan_cuts(cuts: Sequence[Cut], config: Config, ranks: int) -> Plan:
    """As `plan`, of units already cut."""
    dtype = config.param_dtype or cuts[0].named[0][1].dtype
    work = Workload(
        elements=tuple(cut.elements for cut in cuts),
        param_bytes=dtype.itemsize,
        reduce_bytes=config.reduce_dtype.itemsize,
        master_bytes=config.master_dtype.itemsize,
        trained=any(cut.named[0][1].requires_grad for cut in cuts),
        micro_batches=config.micro_batches,
        compute_s=config.compute_s,
        slots=config.slots,
        grad_buffers=config.grad_buffers,
        accumulate_full=config.accumulate == "full",
    )
    return plan_tuples(
        work,
        world=ranks,
        node_size=node_size(config.node_size, ranks),
        speeds=config.links,
        memory_bytes=config.memory_bytes or _memory(cuts[0].named[0][1].device),
    )


def _memory(device: torch.device) -> int:
    """This rank's share of what the device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * _SHARE)
    pages: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(pages * _SHARE / node_size(None, world()[1]))


def measure_links(*, node: int | None = None, nbytes: int = 1 << 24) -> LinkSpeeds:
    """Time messages between rank 0, its neighbour, and the first rank of the next node.

    All ranks call it. Where a class of link does not exist it counts as fast as the other.
    """
    rank, size = world()
    per_node = node_size(node, size)
    found: list[tuple[float, float] | None] = []
    cuda = torch.cuda.is_available() and size > 1 and distributed.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    for other in (1 if per_node > 1 else size, per_node):
        if other >= size:
            found.append(None)
            continue
        latency = _time(rank, other, torch.zeros(1, device=device), 5)
        whole = _time(rank, other, torch.zeros(nbytes // 4, device=device), 3)
        times = torch.tensor([latency, whole], device=device)
        distributed.broadcast(times, 0)
        found.append((float(times[0]), nbytes / max(float(times[1] - times[0]), 1e-9)))
    near, far = found
    near, far = near or far or (0.0, float("inf")), far or near or (0.0, float("inf"))
    return LinkSpeeds(near[1], far[1], near[0], far[0])


def _time(rank: int, other: int, tensor: torch.Tensor, repeats: int) -> float:
    """The shortest swap of a tensor between rank 0 and another, seen by rank 0."""
    best = float("inf")
    if rank not in (0, other):
        return best
    into = torch.empty_like(tensor)
    peer = other if rank == 0 else 0
    for _ in range(repeats + 1):
        start = time.perf_counter()
        works = distributed.batch_isend_irecv(
            [
                distributed.P2POp(distributed.irecv, into, peer),
                distributed.P2POp(distributed.isend, tensor, peer),
            ]
        )
        for work in works:
            work.wait()
        if tensor.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
