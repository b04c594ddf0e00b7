"""Weights from files and from a broadcast, as buckets. Blocking; for the thread beside the engine.

Both give the tensors one after another, each valid until the next is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors import safe_open

from asyncflow_core.errors import DataError
from asyncflow_core.services.weight_sync import Bucket, TensorSpec

__all__ = ["from_broadcast", "from_files"]

# torch marks neither its stores nor its process groups as exported.
_dist: Any = torch.distributed


def from_files(path: str, tensors: Sequence[TensorSpec]) -> Iterator[Bucket]:
    """What lies in a directory of safetensors files.

    Args:
        path: of the directory.
        tensors: what should be there; says which names are tied.

    Raises:
        DataError: there is no such file.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise DataError(f"there are no *.safetensors in {path}; was the version retired?")
    aliases = {spec.name: spec.aliases for spec in tensors}
    for file in files:
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 - it is no mapping
                part = content.get_slice(name)
                shape = tuple(part.get_shape())
                spec = TensorSpec(name, part.get_dtype(), shape, 0, aliases.get(name, ()))
                data = content.get_tensor(name).reshape(-1).view(torch.uint8).numpy()
                yield Bucket((spec,), data)


def from_broadcast(how: Mapping[str, Any], tensors: Sequence[TensorSpec]) -> Iterator[Bucket]:
    """What rank 0 of a group broadcasts; every wait ends by the group's deadline.

    Args:
        how: to join it: backend, host, port, group, rank, world_size, timeout_s, buckets (each its
            bytes and the number and offset of its tensors).
        tensors: those numbered.

    Raises:
        DataError: `how` does not say all this.
        RuntimeError: another member did not come, or is gone.
    """
    try:
        places = [(int(nbytes), list(placed)) for nbytes, placed in how["buckets"]]
        group = _join(how)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"not a way to join a broadcast: {error!r}") from error
    device = torch.device("cuda" if how["backend"] == "nccl" else "cpu")
    memory = torch.empty(max(n for n, _ in places), dtype=torch.uint8, device=device)
    options = _dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    for nbytes, placed in places:
        view = memory[:nbytes]
        if nbytes:
            group.broadcast([view], options).wait()
        specs = tuple(replace(tensors[n], offset=offset) for n, offset in placed)
        yield Bucket(specs, view.cpu().numpy())


def _join(how: Mapping[str, Any]) -> Any:
    limit = timedelta(seconds=how["timeout_s"])
    store = _dist.TCPStore(how["host"], how["port"], is_master=False, timeout=limit)
    store = _dist.PrefixStore(how["group"], store)
    if how["backend"] == "nccl":
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return _dist.ProcessGroupNCCL(store, how["rank"], how["world_size"], options)
    gloo = _dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    options._devices = [
        gloo.create_device(hostname=how["host"])
        if how["host"].startswith("127.")
        else gloo.create_default_device()
    ]
    return gloo(store, how["rank"], how["world_size"], options)
