"""Process groups of the lanes: who talks to whom, over which class of link.

Every lane has process groups of its own, so that two threads never share a communicator; dense and
expert parameters have their own within a lane. All ranks create all groups in one order.

Concurrency: groups are created by the thread that calls `hzp.shard`, on all ranks alike.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from asyncflow_core.errors import ServiceError
from asyncflow_hzp.exchange import Exchange
from asyncflow_hzp.layout import Layout, Sizes

__all__ = ["Links", "agree", "any_rank", "node_size", "same_everywhere", "world"]


def world() -> tuple[int, int]:
    """This rank and the number of ranks; (0, 1) without a process group."""
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def any_rank(here: bool, device: torch.device) -> bool:
    """Whether it holds on any rank. All ranks call it."""
    if world()[1] == 1:
        return here
    found = torch.tensor(int(here), device=device)
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return bool(found)


def same_everywhere(number: int, device: torch.device) -> bool:
    """Whether all ranks have the same number, of at most 62 bits. All ranks call it."""
    if world()[1] == 1:
        return True
    ends = torch.tensor([number, -number], device=device)
    distributed.all_reduce(ends, distributed.ReduceOp.MAX)
    return int(ends[0]) == -int(ends[1])


def agree(failure: BaseException | None, device: torch.device) -> None:
    """Go on if no rank failed; one that did raises what it gives here. All ranks call it.

    Raises:
        ServiceError: another rank failed.
    """
    failed = any_rank(failure is not None, device)
    if failure is not None:
        raise failure
    if failed:
        raise ServiceError("another rank failed; its own error says why")


def node_size(given: int | None, ranks: int) -> int:
    """Neighbouring ranks on fast links: as given, as torchrun says, or all."""
    return given or int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or ranks


class Links:
    """The exchanges of one lane, one a family of parameters.

    Args:
        families: layouts of this rank by name of the family, in the same order on all ranks.
        columns: the rank lists of every family on all ranks, for creating groups.
        node_size: neighbouring ranks on one fast link.
        device: where tensors lie; NCCL serves CUDA.
        timeout_s: longest wait for another rank; None is the backend's default.
    """

    def __init__(
        self,
        families: dict[str, Layout],
        columns: Mapping[str, Sequence[tuple[int, ...]]],
        *,
        node_size: int,
        device: torch.device,
        timeout_s: float | None,
    ) -> None:
        self.rank, size = world()
        self._node = node_size
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._room: dict[torch.dtype, torch.Tensor] = {}
        self._device = device
        self._groups: list[Any] = []
        self._exchanges: dict[str, Exchange] = {}
        for family, layout in families.items():
            group = self._new_group(tuple(range(size))) if size > 1 else None
            exchange = Exchange(self.rank, group, self._node_of, self._scratch)
            if size > 1 and device.type == "cuda":
                self._add_native(exchange, layout.sizes, columns[family])
            self._exchanges[family] = exchange

    def _new_group(self, ranks: tuple[int, ...]) -> Any:
        group = distributed.new_group(list(ranks), timeout=self._timeout)
        if self.rank in ranks:
            self._groups.append(group)
        return group

    def _add_native(
        self, exchange: Exchange, sizes: Sizes, columns: Sequence[tuple[int, ...]]
    ) -> None:
        """Communicators for every group of more than one rank that a layout talks over."""
        seen: set[tuple[int, ...]] = set()
        for ranks in columns:
            for place in range(len(ranks)):
                layout = Layout(sizes, ranks, place)
                z3, z2, z1 = sizes
                for outer, inner in ((z3, 1), (z2, 1), (z1, z2), (z1, z3), (len(ranks), z1)):
                    members = tuple(ranks[p] for p in layout.group(outer, inner))
                    if len(members) > 1 and members not in seen:
                        seen.add(members)
                        group = self._new_group(members)
                        if self.rank in members:
                            exchange.use_native(members, group)

    def exchange(self, family: str) -> Exchange:
        """The collectives of a family."""
        return self._exchanges[family]

    def _node_of(self, rank: int) -> int:
        return rank // self._node

    def _scratch(self, dtype: torch.dtype, elements: int) -> torch.Tensor:
        """Room for what arrives; grows in the first step, then stays."""
        room = self._room.get(dtype)
        if room is None or room.numel() < elements:
            room = torch.empty(elements, dtype=dtype, device=self._device)
            self._room[dtype] = room
        return room[:elements]

    def sent(self) -> Counter[str]:
        """Bytes this rank sent since the start, by class of link."""
        total: Counter[str] = Counter()
        for exchange in self._exchanges.values():
            total.update(exchange.sent)
        return total

    def close(self) -> None:
        """Give the groups back."""
        for group in self._groups:
            distributed.destroy_process_group(group)
        for exchange in self._exchanges.values():
            exchange.release()
        self._groups = []
