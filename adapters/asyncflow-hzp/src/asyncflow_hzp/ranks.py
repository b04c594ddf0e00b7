"""The ranks of one trainer, as torch.distributed sees them."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import distributed

from asyncflow_core.errors import ConfigError, ServiceError
from asyncflow_hzp.links import agree

__all__ = ["Ranks"]


class Ranks:
    """One rank among `size`; alone it needs no process group.

    A group is joined through the variables that torchrun sets (MASTER_ADDR, MASTER_PORT); one that
    is there already is used and left as it is.

    Raises:
        ConfigError: these variables are missing, or the group that is there has other numbers.
    """

    def __init__(self, rank: int, size: int, *, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._joined = False
        if distributed.is_initialized():
            found = distributed.get_rank(), distributed.get_world_size()
            if found != (rank, size):
                raise ConfigError(
                    f"the trainer is rank {rank} of {size}, the process group that is there "
                    f"already has rank {found[0]} of {found[1]}; give both the same numbers, or "
                    f"let the trainer join a group of its own"
                )
            return
        if size == 1:
            return
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(
                f"{size} trainer ranks need the environment variables {', '.join(missing)}; "
                f"start them with a launcher or torchrun"
            )
        distributed.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        self._joined = True

    def total(self, value: float, failure: BaseException | None = None) -> float:
        """The sum of the ranks' values, if no rank failed; one that did raises what it gives here.

        Raises:
            ServiceError: another rank failed.
        """
        self.agree(failure)
        if self.size == 1:
            return value
        sums = torch.full((1,), value, dtype=torch.float64, device=self._device)
        distributed.all_reduce(sums)
        return float(sums)

    def most(self, count: int, *, failed: bool = False) -> int:
        """The largest of the ranks' counts.

        Raises:
            ServiceError: another rank says that it failed.
        """
        if self.size == 1:
            return count
        found = torch.tensor([count, int(failed)], device=self._device)
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
        if int(found[1]) and not failed:
            raise ServiceError("another trainer rank refused its rows; its own error says why")
        return int(found[0])

    def lead(self, work: Callable[[], None]) -> None:
        """Let rank 0 work while the others wait; its failure fails all.

        Raises:
            ServiceError: on the other ranks; rank 0 raises what failed.
        """
        failure: BaseException | None = None
        if self.rank == 0:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the others must hear of it first
                failure = error
        self.agree(failure)

    def agree(self, failure: BaseException | None) -> None:
        """Go on if no rank failed; one that did raises what it gives here.

        Raises:
            ServiceError: another rank failed.
        """
        agree(failure, self._device)

    def close(self) -> None:
        """Leave the group, if it was joined here."""
        if self._joined:
            distributed.destroy_process_group()
            self._joined = False
