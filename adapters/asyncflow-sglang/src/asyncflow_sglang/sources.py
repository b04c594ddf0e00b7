"""Weights from whatever a source is, as buckets. A broadcast needs torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from asyncflow_core.errors import DataError, EngineError, UnsupportedCapabilityError
from asyncflow_core.services.weight_sync import Bucket, TensorSpec, WeightSource

__all__ = ["buckets_of"]


async def buckets_of(source: WeightSource) -> AsyncGenerator[Bucket, None]:
    """Its buckets, each valid until the next is asked for.

    Raises:
        DataError: it is none, or does not say how to join its group.
        EngineError: another member of its group did not come, or is gone.
        UnsupportedCapabilityError: a group, and torch is not installed.
    """
    if source.kind == "buckets" and source.buckets is not None:
        async for bucket in source.buckets:
            yield bucket
        return
    found = _from_broadcast(source.collective or {}, source.manifest.tensors)
    while True:
        try:
            more = await asyncio.to_thread(next, found, None)
        except RuntimeError as error:
            raise EngineError(f"the broadcast of weights failed: {error}") from error
        if more is None:
            return
        yield more


def _from_broadcast(how: Mapping[str, Any], tensors: Sequence[TensorSpec]) -> Iterator[Bucket]:
    """What rank 0 of a group broadcasts; every wait ends by the group's deadline.

    `how` has backend, host, port, group, rank, world_size, timeout_s, buckets (each its bytes and
    the number and offset of its tensors).
    """
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise UnsupportedCapabilityError(
            "weights by broadcast need torch here; try: pip install 'asyncflow-sglang[torch]'"
        ) from error
    try:
        places = [(int(nbytes), list(placed)) for nbytes, placed in how["buckets"]]
        group, options = _join(torch.distributed, how)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"not a way to join a broadcast: {error!r}") from error
    device = torch.device("cuda" if how["backend"] == "nccl" else "cpu")
    memory = torch.empty(max(n for n, _ in places), dtype=torch.uint8, device=device)
    for nbytes, placed in places:
        view = memory[:nbytes]
        if nbytes:
            group.broadcast([view], options).wait()
        specs = tuple(replace(tensors[n], offset=offset) for n, offset in placed)
        yield Bucket(specs, view.cpu().numpy())


def _join(dist: Any, how: Mapping[str, Any]) -> tuple[Any, Any]:
    """The group, and how rank 0 broadcasts in it."""
    limit = timedelta(seconds=how["timeout_s"])
    store = dist.TCPStore(how["host"], how["port"], is_master=False, timeout=limit)
    store = dist.PrefixStore(how["group"], store)
    root = dist.BroadcastOptions()
    root.rootRank, root.rootTensor = 0, 0
    if how["backend"] == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, how["rank"], how["world_size"], options), root
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    options._devices = [
        gloo.create_device(hostname=how["host"])
        if how["host"].startswith("127.")
        else gloo.create_default_device()
    ]
    return gloo(store, how["rank"], how["world_size"], options), root
