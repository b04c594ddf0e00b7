"""Joining a group of one broadcast. Blocking; every wait has a deadline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from asyncflow_core.errors import DataError
from asyncflow_core.services.weight_sync import Bucket, TensorSpec

# torch marks neither its stores nor its process groups as exported.
dist: Any = torch.distributed

__all__ = ["Membership", "Place", "connect", "dist", "receive", "send"]


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket: its size, and (number in the manifest, offset) of each tensor."""

    nbytes: int
    tensors: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Membership:
    """How to take part in one broadcast; rank 0 sends."""

    backend: str
    host: str
    port: int
    group: str
    rank: int
    world_size: int
    timeout_s: float
    buckets: tuple[Place, ...]

    def to_dict(self) -> dict[str, Any]:
        """For `WeightSource.collective`."""
        places = [[place.nbytes, [list(t) for t in place.tensors]] for place in self.buckets]
        return {**asdict(self), "buckets": places}

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Membership:
        """From what `to_dict` made; `DataError` if it is not that."""
        try:
            places = tuple(
                Place(int(nbytes), tuple((int(n), int(offset)) for n, offset in tensors))
                for nbytes, tensors in given["buckets"]
            )
            return cls(**{**given, "buckets": places})
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a way to join a collective: {error!r}") from error

    def join(self) -> Any:
        """The process group, once all members are there."""
        store = dist.PrefixStore(self.group, connect(self.host, self.port, self.timeout_s))
        limit = timedelta(seconds=self.timeout_s)
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            return dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = limit
        loopback = self.host.startswith("127.")
        options._devices = [
            gloo.create_device(hostname=self.host) if loopback else gloo.create_default_device()
        ]
        return gloo(store, self.rank, self.world_size, options)

    @property
    def device(self) -> torch.device:
        """Where its bytes must lie."""
        return torch.device("cuda" if self.backend == "nccl" else "cpu")


def connect(host: str, port: int, timeout_s: float) -> Any:
    """A connection of one's own to a publisher's store: one that waits blocks all its users."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def _broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def send(member: Membership, buffers: Sequence[Any]) -> None:
    """Broadcast uint8 buffers, in order."""
    group = member.join()
    for buffer in buffers:
        if len(buffer):
            _broadcast(group, torch.from_numpy(buffer).to(member.device))


def receive(member: Membership, tensors: Sequence[TensorSpec]) -> Iterator[Bucket]:
    """What rank 0 broadcasts, through one buffer."""
    group = member.join()
    largest = max(place.nbytes for place in member.buckets)
    memory = torch.empty(largest, dtype=torch.uint8, device=member.device)
    for place in member.buckets:
        view = memory[: place.nbytes]
        if place.nbytes:
            _broadcast(group, view)
        specs = tuple(replace(tensors[n], offset=offset) for n, offset in place.tensors)
        yield Bucket(specs, view.cpu().numpy())
