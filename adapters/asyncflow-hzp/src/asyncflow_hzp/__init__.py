"""AsyncHZP: hierarchical ZeRO whose collectives run ahead of compute, and the `hzp` trainer on it.

The names here need torch, and are loaded when first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncflow_hzp.config import Config
    from asyncflow_hzp.layout import Sizes
    from asyncflow_hzp.moe import ExpertParallel
    from asyncflow_hzp.optimizer import Optimizer
    from asyncflow_hzp.planner import LinkSpeeds
    from asyncflow_hzp.planning import measure_links, plan
    from asyncflow_hzp.sharded import Sharded, shard
    from asyncflow_hzp.state import load_state, named_whole, save_state
    from asyncflow_hzp.units import expert_parallel

__all__ = [
    "Config",
    "ExpertParallel",
    "LinkSpeeds",
    "Optimizer",
    "Sharded",
    "Sizes",
    "expert_parallel",
    "load_state",
    "measure_links",
    "named_whole",
    "plan",
    "save_state",
    "shard",
]

_HOMES = {
    "Config": "config",
    "ExpertParallel": "moe",
    "LinkSpeeds": "planner",
    "Optimizer": "optimizer",
    "Sharded": "sharded",
    "Sizes": "layout",
    "expert_parallel": "units",
    "load_state": "state",
    "measure_links": "planning",
    "named_whole": "state",
    "plan": "planning",
    "save_state": "state",
    "shard": "sharded",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
