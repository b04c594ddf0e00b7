"""AsyncFlow: async RL post-training whose core knows no engine.

Three levels, one set of names. A file: `Flow.from_config("config.yaml").run()`. Python:
`Flow(rollout=use("transformers", model=...), ...)`. Your own loop:
`async with open("trainer", "hzp", ...) as trainer: ...`.

Names load when first used, so importing this package costs little more than importing numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncflow_core.batch import Batch, BatchRef, Column, GroupKey, Key
    from asyncflow_core.errors import AsyncFlowError, ConfigError
    from asyncflow_core.flow.flow import Flow, reward, stage, use
    from asyncflow_core.flow.open import open_service as open
    from asyncflow_core.flow.running.results import StepResult, Summary
    from asyncflow_core.hookspecs import hookimpl
    from asyncflow_core.registry import Registrar, Registry
    from asyncflow_core.services.data_store import DataStore
    from asyncflow_core.services.rollout import Rollout
    from asyncflow_core.services.trainer import Trainer
    from asyncflow_core.services.weight_sync import WeightSync

__all__ = [
    "AsyncFlowError",
    "Batch",
    "BatchRef",
    "Column",
    "ConfigError",
    "DataStore",
    "Flow",
    "GroupKey",
    "Key",
    "Registrar",
    "Registry",
    "Rollout",
    "StepResult",
    "Summary",
    "Trainer",
    "WeightSync",
    "hookimpl",
    "open",
    "reward",
    "stage",
    "use",
]

__version__ = "0.1.0"

_HOMES = {
    "AsyncFlowError": "errors",
    "Batch": "batch",
    "BatchRef": "batch",
    "Column": "batch",
    "ConfigError": "errors",
    "DataStore": "services.data_store",
    "Flow": "flow.flow",
    "GroupKey": "batch",
    "Key": "batch",
    "Registrar": "registry",
    "Registry": "registry",
    "Rollout": "services.rollout",
    "StepResult": "flow.running.results",
    "Summary": "flow.running.results",
    "Trainer": "services.trainer",
    "WeightSync": "services.weight_sync",
    "hookimpl": "hookspecs",
    "reward": "flow.flow",
    "stage": "flow.flow",
    "use": "flow.flow",
}


def __getattr__(name: str) -> Any:
    if name == "open":
        value = importlib.import_module("asyncflow_core.flow.open").open_service
    elif name in _HOMES:
        value = getattr(importlib.import_module(f"asyncflow_core.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'asyncflow_core' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
