"""What a user of `hzp.shard` may choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from asyncflow_hzp.layout import Sizes
from asyncflow_hzp.planner import LinkSpeeds

__all__ = ["Config", "Units"]

Units = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]
"""Which modules are units: by class, or by a function of name and module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How a model is sharded.

    Attributes:
        sharding: (z3, z2, z1), a preset of `layout.PRESETS`, or "auto" for the cost model's choice.
        expert_sharding: (z3, z2, z1) of expert-parallel parameters among the ranks that hold the
            same; None takes `sharding`, each size no larger than their number.
        units: modules to gather as one. Parameters outside of them form a unit a module.
        node_size: neighbouring ranks on fast links; None takes LOCAL_WORLD_SIZE.
        param_dtype: of the forward and backward, and of gathers; None keeps the model's.
        reduce_dtype: of gradients on their way.
        master_dtype: of the optimizer's weights, moments and gradients.
        slots: units gathered at a time, at least 2. More slots move fewer bytes.
        slot_bytes: budget for them instead of `slots`: as many as fit, at least 2.
        grad_buffers: units' full gradients on their way at a time.
        accumulate: where gradients of all micro-batches but the last go: "full" keeps them whole
            and moves nothing, "shard" reduces each over z2 ranks.
        average: divide gradients by the number of ranks, as DDP does; False sums.
        lanes: issue collectives from threads, ahead of compute; False waits for each.
        checkpoint: recompute each unit's activations in the backward.
        links: speeds for the cost model; `measure_links` finds yours.
        micro_batches, compute_s: of a step, for the cost model.
        memory_bytes: most that parameters, gradients and optimizer state may take on a rank;
            "auto" obeys it.
        timeout_s: longest a collective waits for another rank; None is the backend's default.
        init: gives values to a module made on the meta device; None calls `reset_parameters`.
    """

    sharding: Sizes | tuple[int, int, int] | str = "zero3"
    expert_sharding: Sizes | tuple[int, int, int] | None = None
    units: Units | None = None
    node_size: int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    master_dtype: torch.dtype = torch.float32
    slots: int = 3
    slot_bytes: int | None = None
    grad_buffers: int = 2
    accumulate: Literal["full", "shard"] = "full"
    average: bool = True
    lanes: bool = True
    checkpoint: bool = False
    links: LinkSpeeds = field(default_factory=LinkSpeeds)
    micro_batches: int = 1
    compute_s: float = 0.0
    memory_bytes: int | None = None
    timeout_s: float | None = None
    init: Callable[[nn.Module], None] | None = None
