"""Comparing what a replica serves with what the trainer published, bit for bit.

A checksum proves what was staged. This proves what serves: an engine may fuse, quantise or reorder
what it was given, and generate from something else.
"""

from __future__ import annotations

import numpy as np

from asyncflow_core.errors import DataError
from asyncflow_core.services.rollout import SupportsReadback
from asyncflow_core.services.weight_sync import Bucket, TensorSpec, WeightSource

__all__ = ["first_difference"]


async def first_difference(published: WeightSource, replica: SupportsReadback) -> str:
    """The first tensor that differs, and where; empty if none does.

    Args:
        published: buckets of a version, fetched anew.
        replica: an engine that serves it.
    """
    if published.buckets is None:
        raise DataError(f"only buckets can be compared, got a source of {published.kind}")
    async for bucket in published.buckets:
        expected = {spec.name: spec for spec in bucket.specs}
        async for served in replica.read_weights(bucket.specs):
            for spec in served.specs:
                wanted = expected.pop(spec.name, None)
                if wanted is None:
                    return f"it serves a tensor {spec.name!r} that was not asked for"
                found = _difference(bucket, wanted, served, spec)
                if found:
                    return found
        if expected:
            return f"it does not serve the tensor {min(expected)!r}"
    return ""


def _difference(bucket: Bucket, wanted: TensorSpec, served: Bucket, spec: TensorSpec) -> str:
    if (wanted.dtype, tuple(wanted.shape)) != (spec.dtype, tuple(spec.shape)):
        return (
            f"it serves the tensor {spec.name!r} as {spec.dtype} {list(spec.shape)}, published was "
            f"{wanted.dtype} {list(wanted.shape)}"
        )
    ours, theirs = bucket.tensor_bytes(wanted), served.tensor_bytes(spec)
    if np.array_equal(ours, theirs):
        return ""
    different = np.flatnonzero(ours != theirs)
    return (
        f"it serves the tensor {spec.name!r} with {len(different)} of {len(ours)} bytes different "
        f"from what was published, the first at byte {different[0]}"
    )
