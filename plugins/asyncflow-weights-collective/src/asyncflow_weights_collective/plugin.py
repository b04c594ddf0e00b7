"""Registration; imports no torch."""

from __future__ import annotations

from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registrar
from asyncflow_core.services.weight_sync import WeightSync, WeightSyncCapabilities
from asyncflow_weights_collective.options import CollectiveOptions

__all__ = ["asyncflow_register", "capabilities"]


def _collective(options: CollectiveOptions, ctx: PartContext) -> WeightSync:
    from asyncflow_weights_collective.service import CollectiveWeightSync

    return CollectiveWeightSync(options, ctx)


def capabilities(options: CollectiveOptions) -> WeightSyncCapabilities:
    """What it can do with these options."""
    here = frozenset({"process", "host"})
    return WeightSyncCapabilities(
        localities=here if options.host == "127.0.0.1" else here | {"network"},
        source="collective",
        concurrent_versions=options.versions,
    )


@hookimpl
def asyncflow_register(registrar: Registrar) -> None:
    """Offer the weight transport `collective`."""
    registrar.add(
        "weight_sync",
        "collective",
        _collective,
        api_version=1,
        options=CollectiveOptions,
        capabilities=capabilities,
    )
