"""AsyncHZP: hierarchical ZeRO whose collectives run ahead of compute, and the `hzp` trainer on it.

The names here need torch, and are loaded when first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncflow_hzp.config import Config
    from asyncflow_hzp.layout import Sizes
    from asyncflow_hzp.optimizer import Optimizer
    from asyncflow_hzp.sharded import Sharded, shard

__all__ = ["Config", "Optimizer", "Sharded", "Sizes", "shard"]

_HOMES = {
    "Config": "config",
    "Optimizer": "optimizer",
    "Sharded": "sharded",
    "Sizes": "layout",
    "shard": "sharded",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
