"""The ranks of one trainer, as torch.distributed sees them."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import distributed

from asyncflow_core.errors import ConfigError, ServiceError

__all__ = ["Ranks"]


class Ranks:
    """One rank among `size`; alone it needs no process group.

    A group is joined through the variables that torchrun sets (MASTER_ADDR, MASTER_PORT); one that
    is there already is used and left as it is.
    """

    def __init__(self, rank: int, size: int, *, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._joined = False
        if size == 1 or distributed.is_initialized():
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

    def sum(self, tensor: torch.Tensor) -> None:
        """Add up over the ranks, in place."""
        if self.size > 1:
            distributed.all_reduce(tensor)

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
        failed = torch.full((1,), float(failure is not None), device=self._device)
        self.sum(failed)
        if failure is not None:
            raise failure
        if float(failed) > 0:
            raise ServiceError("trainer rank 0 failed; its own error says why")

    def close(self) -> None:
        """Leave the group, if it was joined here."""
        if self._joined:
            distributed.destroy_process_group()
            self._joined = False
