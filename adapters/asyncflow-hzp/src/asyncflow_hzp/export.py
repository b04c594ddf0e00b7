"""A model's weights as buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from asyncflow_core.services.weight_sync import Bucket, TensorSpec

__all__ = ["aliases", "buckets"]

_ALIGNMENT = 64
"""Bytes; lets a receiver view any tensor of a bucket in its dtype."""

_DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Further names of each parameter that has more than one (tied weights)."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}


def buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], tied: dict[str, tuple[str, ...]], *, size: int
) -> Iterator[Bucket]:
    """Copy tensors into one buffer after another, which is one and the same memory.

    Args:
        tensors: name and tensor; each tensor is needed only until the next is asked for.
        tied: further names, by name.
        size: bytes of the buffer; grows to hold a larger tensor.
    """
    specs: list[TensorSpec] = []
    buffer = torch.empty(0, dtype=torch.uint8)
    used = 0
    for name, tensor in tensors:
        spec = TensorSpec(
            name, _DTYPES[tensor.dtype], tuple(tensor.shape), aliases=tied.get(name, ())
        )
        start = -(-used // _ALIGNMENT) * _ALIGNMENT
        if specs and start + spec.nbytes > len(buffer):
            yield Bucket(tuple(specs), buffer[:used].numpy())
            specs, start = [], 0
        if start + spec.nbytes > len(buffer):
            # Pinned memory takes copies from a GPU at full speed.
            buffer = torch.empty(
                max(size, spec.nbytes), dtype=torch.uint8, pin_memory=tensor.is_cuda
            )
        used = start + spec.nbytes
        buffer[start:used].copy_(tensor.detach().reshape(-1).view(torch.uint8))
        specs.append(replace(spec, offset=start))
    if specs:
        yield Bucket(tuple(specs), buffer[:used].numpy())
