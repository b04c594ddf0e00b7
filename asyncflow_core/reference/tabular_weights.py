"""Weights of the tabular policy: out of a trainer in buckets, into a rollout from buckets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.reference.tabular import TabularModel
from asyncflow_core.services.weight_sync import (
    Bucket,
    Checksum,
    TensorSpec,
    WeightManifest,
    check_bucket,
    check_tensors,
)

__all__ = ["read_weights", "write_weights"]


async def read_weights(
    model: TabularModel, manifest: WeightManifest, buckets: AsyncIterator[Bucket]
) -> tuple[NDArray[np.float64], str]:
    """Copy buckets into a new table.

    Returns:
        The logits and the checksum of what lies in them.

    Raises:
        DataError: names, shapes or dtypes do not fit the model, or a tensor is missing or twice.
    """
    check_tensors(manifest.tensors, model.specs())
    logits = np.empty_like(model.logits)
    tensors = model.tensors(logits)
    missing = {spec.name: spec for spec in model.specs()}
    async for bucket in buckets:
        check_bucket(bucket)
        here = [missing.pop(spec.name) for spec in bucket.specs if spec.name in missing]
        check_tensors(bucket.specs, here)
        for spec in bucket.specs:
            # The buffer may be unaligned and may be used again: the bytes are copied out of it.
            values = np.frombuffer(bucket.tensor_bytes(spec).tobytes(), np.float64)
            tensors[spec.name][...] = values.reshape(spec.shape)
    check_tensors([], missing.values())
    checksum = Checksum()
    for spec in model.specs():
        checksum.add(spec.name, spec.dtype, spec.shape, tensors[spec.name])
    return logits, checksum.hexdigest()


def write_weights(
    model: TabularModel, bucket_bytes: int, wanted: Sequence[TensorSpec] | None = None
) -> Iterator[Bucket]:
    """The wanted tensors, or all, in buckets of at most `bucket_bytes`, a larger tensor alone.

    All buckets use one buffer, as the contract allows, so that a receiver that keeps a bucket
    without copying is found out here. An update makes a new table, so the logits are those of the
    first call, whatever the trainer does meanwhile.
    """
    tensors = model.tensors()
    groups: list[list[TensorSpec]] = [[]]
    offset = 0
    for spec in model.specs() if wanted is None else wanted:
        if groups[-1] and offset + spec.nbytes > bucket_bytes:
            groups.append([])
            offset = 0
        groups[-1].append(replace(spec, offset=offset))
        offset += spec.nbytes
    if not groups[0]:
        return
    buffer = np.empty(max(specs[-1].offset + specs[-1].nbytes for specs in groups), np.uint8)
    for specs in groups:
        for spec in specs:
            raw = tensors[spec.name].reshape(-1).view(np.uint8)
            buffer[spec.offset : spec.offset + spec.nbytes] = raw
        yield Bucket(tuple(specs), buffer[: specs[-1].offset + specs[-1].nbytes])
