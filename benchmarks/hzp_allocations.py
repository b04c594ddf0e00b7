"""Counts tensor allocations made by asyncflow_hzp's own code, on all threads.

A dispatch mode sees every operator; one whose result lies in memory that none of its arguments has
is an allocation. It belongs to the innermost Python frame outside of torch: hzp's code, or the
model's, the optimizer class's temporaries counting as hzp's. Dispatch modes are per thread, so each
lane's job runs in one too.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncflow_hzp.lanes import Job


class _Seen(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(value) for value in tree_leaves((args, kwargs)) if _is_tensor(value)}
        new = [v for v in tree_leaves(result) if _is_tensor(v) and v.numel()]
        if any(_storage(value) not in given for value in new):
            place = _place()
            if place:
                self._found[f"{func} {place}"] += 1
        return result


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place() -> str:
    """Where in hzp's code this happens; empty in the model's."""
    frame = sys._getframe(2)
    while frame is not None:
        name, code = frame.f_globals.get("__name__", ""), frame.f_code
        if name.startswith("asyncflow_hzp"):
            return "" if code.co_name == "run_module" else f"{name}:{frame.f_lineno}"
        if not name.startswith("torch") and name != __name__:
            return ""
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Allocations by operator and line, made while the block runs."""
    found: Counter[str] = Counter()
    run = Job.run

    def seen(self: Job, *args: Any) -> Any:
        with _Seen(found):
            return run(self, *args)

    Job.run = seen  # type: ignore[method-assign]
    try:
        with _Seen(found):
            yield found
    finally:
        Job.run = run  # type: ignore[method-assign]
