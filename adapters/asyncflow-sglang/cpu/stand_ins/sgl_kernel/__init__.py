"""Stands in for SGLang's kernel package on a CPU that has none of its kernels.

SGLang imports names of CPU kernels when its modules load, and then takes its own torch-native
branches. So every name exists, computes nothing, and says so if it is ever called.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} was called; there is no such kernel here")

    return missing
