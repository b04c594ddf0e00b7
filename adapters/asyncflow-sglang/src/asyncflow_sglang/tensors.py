"""Held weights as torch tensors: for SGLang's shared memory protocol, and for broadcasts. Blocking.

SGLang's /update_weights_from_tensor takes a pickle, which says where in shared memory a tensor
lies. It is written here and read by the server, through its own list of what it may contain;
nothing is ever unpickled here.
"""

from __future__ import annotations

import base64
import io
import socket
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

from asyncflow_core.services.weight_sync import TensorSpec
from asyncflow_sglang.files import Held

__all__ = ["BroadcastGroup", "shared", "tensor", "torch_dtype"]

# torch marks neither its stores nor its process groups as exported.
_dist: Any = torch.distributed
_c10d: Any = torch.distributed.distributed_c10d
_sharing: Any = torch.multiprocessing

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_strategy = threading.Lock()


def torch_dtype(dtype: str) -> str:
    """Its name in torch, as SGLang wants it."""
    return str(_DTYPES[dtype]).removeprefix("torch.")


def tensor(held: Held, spec: TensorSpec) -> torch.Tensor:
    """A copy in memory."""
    data = torch.from_numpy(held.read(spec.name).copy())
    return data.view(_DTYPES[spec.dtype]).reshape(spec.shape)


@contextmanager
def shared(held: Held, part: Sequence[TensorSpec]) -> Iterator[str]:
    """Tensors in shared memory, as SGLang's protocol names them; they stay until the exit.

    By file name: descriptors would be passed over a socket whose key only child processes have,
    and SGLang's scheduler dies of it.
    """
    tensors = [(spec.name, tensor(held, spec)) for spec in part]
    with _strategy:  # it is one setting of the whole process
        before = _sharing.get_sharing_strategy()
        _sharing.set_sharing_strategy("file_system")
        try:
            buffer = io.BytesIO()
            ForkingPickler(buffer).dump(tensors)
        finally:
            _sharing.set_sharing_strategy(before)
    yield base64.b64encode(buffer.getvalue()).decode()
    del tensors


class BroadcastGroup:
    """A torch.distributed group of this process, rank 0, and one server's ranks."""

    def __init__(self, backend: str, host: str, world_size: int, *, timeout_s: float) -> None:
        """Choose a port and a name; `join` waits for the server."""
        self.name = f"asyncflow-{uuid.uuid4().hex}"
        self.host = host
        with socket.socket() as probe:
            probe.bind((host, 0))
            self.port: int = probe.getsockname()[1]
        self._backend = backend
        self._world_size = world_size
        self._limit = timedelta(seconds=timeout_s)
        self._store: Any = None
        self._group: Any = None
        self._closed = False

    def join(self) -> None:
        """Form the group, under the names by which SGLang's side looks for it.

        After a `close` it waits on, so that a server that comes late is not left waiting, and
        leaves at once.

        Raises:
            RuntimeError: the server did not come in time.
        """
        self._store = _dist.TCPStore(
            self.host, self.port, self._world_size, is_master=True, timeout=self._limit,
            wait_for_workers=False,
        )  # fmt: skip
        self._group, _ = _c10d._new_process_group_helper(
            self._world_size,
            0,
            [],
            self._backend,
            _dist.PrefixStore(self.name, self._store),
            group_name=self.name,
            timeout=self._limit,
        )
        _c10d._world.pg_group_ranks[self._group] = {i: i for i in range(self._world_size)}
        if self._closed:
            self.close()

    def send(self, held: Held, part: Sequence[TensorSpec]) -> None:
        """Broadcast tensors one by one.

        Raises:
            RuntimeError: the server is gone.
        """
        device = "cuda" if self._backend == "nccl" else "cpu"
        for spec in part:
            _dist.broadcast(tensor(held, spec).to(device), src=0, group=self._group)

    def close(self) -> None:
        """Leave; a broadcast under way fails."""
        self._closed = True
        group, self._group = self._group, None
        if group is not None:
            _dist.destroy_process_group(group)
        self._store = None
