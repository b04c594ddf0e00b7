"""Two sets of a model's parameters: one serves, the other takes in the next version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from asyncflow_core.errors import DataError
from asyncflow_core.services.weight_sync import (
    Bucket,
    Checksum,
    TensorSpec,
    check_bucket,
    check_tensors,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = ["DoubleBuffer"]

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class DoubleBuffer:
    """Takes in tensors beside those that serve, then changes places with them.

    `swap` exchanges pointers, so its cost does not depend on the model's size; what served before
    is the memory for the version after. The second set is allocated by the first `begin`.

    Concurrency: `begin`, `add` and `finish` on one thread; `swap` where the model runs, not before
    `finish` returned.
    """

    def __init__(self, model: nn.Module) -> None:
        self._params = dict(model.named_parameters())
        for param in self._params.values():
            # Bytes are put where they lie: in a transposed view there would be no place for them.
            param.data = param.data.contiguous()
        first = {id(param): name for name, param in self._params.items()}
        self._names = {
            name: first[id(param)] for name, param in model.named_parameters(remove_duplicate=False)
        }
        self._staged: dict[str, torch.Tensor] = {}
        self._expected: dict[str, TensorSpec] = {}
        self._taken: list[TensorSpec] = []

    def begin(self, tensors: Sequence[TensorSpec]) -> None:
        """Start to take in these tensors.

        Raises:
            DataError: they are not exactly the model's; the first difference is named.
        """
        theirs = [replace(spec, name=self._own_name(spec)) for spec in tensors]
        seen: set[str] = set()
        for spec, renamed in zip(tensors, theirs, strict=True):
            if renamed.name in seen:
                raise DataError(
                    f"the weights have the tensor {spec.name!r} beside {renamed.name!r}, which "
                    f"are one tied tensor in the model"
                )
            seen.add(renamed.name)
        ours = [
            TensorSpec(name, _DTYPES.get(param.dtype, str(param.dtype)), tuple(param.shape))
            for name, param in self._params.items()
        ]
        check_tensors(theirs, ours)
        if not self._staged:
            self._staged = {n: torch.empty_like(p.data) for n, p in self._params.items()}
        self._expected = {spec.name: spec for spec in tensors}
        self._taken = []

    def add(self, bucket: Bucket) -> None:
        """Copy a bucket's tensors into the second set.

        Raises:
            DataError: a tensor that was not announced, comes twice or leaves its bucket.
        """
        check_bucket(bucket)
        for spec in bucket.specs:
            expected = self._expected.pop(spec.name, None)
            if expected is None or replace(spec, offset=0) != replace(expected, offset=0):
                raise DataError(
                    f"a bucket has the tensor {spec}, the manifest announced {expected}"
                )
            _copy(bucket.tensor_bytes(spec), _bytes(self._staged[self._own_name(spec)]))
            self._taken.append(spec)

    def finish(self) -> tuple[str, int]:
        """Checksum and bytes of the second set, as it lies there now that all has come.

        Raises:
            DataError: a tensor did not come.
        """
        if self._expected:
            raise DataError(f"the buckets ended without the tensor {min(self._expected)!r}")
        checksum = Checksum()
        for spec in self._taken:
            held = _bytes(self._staged[self._own_name(spec)]).cpu().numpy()
            checksum.add(spec.name, spec.dtype, spec.shape, held)
        return checksum.hexdigest(), sum(spec.nbytes for spec in self._taken)

    def serving(self, spec: TensorSpec) -> Bucket:
        """A tensor as it serves, in a bucket of its own; a view of it where it lies on the CPU.

        Raises:
            DataError: the model has no such tensor.
        """
        param = self._params.get(self._own_name(spec))
        if param is None:
            raise DataError(f"the model has no tensor {spec.name!r}")
        dtype = _DTYPES.get(param.dtype, str(param.dtype))
        held = replace(spec, dtype=dtype, shape=tuple(param.shape), offset=0)
        return Bucket((held,), _bytes(param.data).cpu().numpy())

    def swap(self) -> None:
        """Let the second set serve."""
        for name, param in self._params.items():
            param.data, self._staged[name] = self._staged[name], param.data

    def _own_name(self, spec: TensorSpec) -> str:
        """The name under which the model lists the tensor; a tied one has several."""
        return self._names.get(spec.name, spec.name)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _copy(source: NDArray[np.uint8], target: torch.Tensor) -> None:
    if target.device.type == "cpu":
        np.copyto(target.numpy(), source)
    else:
        # Received buffers are read-only, which torch does not know.
        target.copy_(torch.from_numpy(source if source.flags.writeable else source.copy()))
