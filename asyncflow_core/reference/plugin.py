"""Registers the reference implementations, as an outsider's plugin would."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from asyncflow_core.config import Section
from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import PartContext
from asyncflow_core.reference.losses import TabularPPOClipOptions, tabular_ppo_clip
from asyncflow_core.reference.prompts import (
    JsonlPrompts,
    JsonlPromptsOptions,
    check_jsonl,
    jsonl_contract,
)
from asyncflow_core.reference.tabular_rollout import (
    TABULAR_ROLLOUT,
    TabularRollout,
    TabularRolloutOptions,
)
from asyncflow_core.reference.tabular_trainer import (
    TabularTrainer,
    TabularTrainerOptions,
    tabular_trainer,
)
from asyncflow_core.reference.tokenizer import CharactersOptions, CharactersTokenizer
from asyncflow_core.reference.weight_sync import (
    MEMORY_WEIGHT_SYNC,
    MemoryWeightSync,
)
from asyncflow_core.registry import Registrar, Registry
from asyncflow_core.services.data_store import (
    LEASE_POLICIES,
    DataStore,
    DataStoreCapabilities,
)
from asyncflow_core.services.trainer import LossCapabilities

__all__ = ["MemoryDataStoreOptions", "asyncflow_register"]


class MemoryDataStoreOptions(Section):
    """Options of the `memory` data store."""

    capacity_rows: int = Field(default=65536, ge=1)
    """Rows admitted at once; producers wait while the store is full."""
    capacity_bytes: int = Field(default=2 << 30, ge=1)
    """Bytes reserved at once."""
    max_staleness: int = Field(default=0, ge=0)
    """Versions by which a rollout may be ahead of the step that trains its rows."""
    durability: Literal["none"] = "none"
    """The in-process store keeps nothing beyond its process."""
    lease_policies: tuple[str, ...] = ()
    """Lease policies of other plugins, by name; a section's `lease_policy` may name them then."""


def _data_store(options: MemoryDataStoreOptions, ctx: PartContext) -> DataStore:
    from asyncflow_core.reference.data_store import InProcessDataStore

    values = dict(options)
    registry = ctx.registry or Registry()
    policies = registry.lease_policies(values.pop("lease_policies"))
    return InProcessDataStore(**values, policies=policies)


def _capabilities(options: MemoryDataStoreOptions) -> DataStoreCapabilities:
    return DataStoreCapabilities(
        capacity_rows=options.capacity_rows,
        capacity_bytes=options.capacity_bytes,
        lease_policies=LEASE_POLICIES | set(options.lease_policies),
    )


@hookimpl
def asyncflow_register(registrar: Registrar) -> None:
    """Offer the reference services and parts."""
    registrar.add(
        "data_store",
        "memory",
        _data_store,
        api_version=1,
        options=MemoryDataStoreOptions,
        capabilities=_capabilities,
    )
    registrar.add(
        "rollout",
        "tabular",
        TabularRollout,
        api_version=1,
        options=TabularRolloutOptions,
        capabilities=TABULAR_ROLLOUT,
    )
    registrar.add(
        "trainer",
        "tabular",
        TabularTrainer,
        api_version=1,
        options=TabularTrainerOptions,
        capabilities=tabular_trainer,
    )
    registrar.add(
        "weight_sync",
        "memory",
        MemoryWeightSync,
        api_version=1,
        capabilities=MEMORY_WEIGHT_SYNC,
    )
    registrar.add(
        "tokenizer", "characters", CharactersTokenizer, api_version=1, options=CharactersOptions
    )
    registrar.add(
        "prompts",
        "jsonl",
        JsonlPrompts,
        api_version=1,
        options=JsonlPromptsOptions,
        contract=jsonl_contract,
        check=check_jsonl,
    )
    registrar.add(
        "loss",
        "tabular_ppo_clip",
        lambda options, ctx: tabular_ppo_clip,
        api_version=1,
        options=TabularPPOClipOptions,
        capabilities=LossCapabilities(
            arrays="numpy", reads=("behaviour_logprobs", "advantages", "loss_mask")
        ),
    )
