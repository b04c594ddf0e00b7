"""Registration."""

from __future__ import annotations

from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registrar
from asyncflow_core.services.weight_sync import WeightSync, WeightSyncCapabilities
from asyncflow_weights_host.options import HostOptions

__all__ = ["asyncflow_register"]


def _host(options: HostOptions, ctx: PartContext) -> WeightSync:
    from asyncflow_weights_host.service import HostWeightSync

    return HostWeightSync(options, ctx)


def _capabilities(options: HostOptions) -> WeightSyncCapabilities:
    return WeightSyncCapabilities(
        localities=frozenset({"process", "host"}),
        source="buckets",
        concurrent_versions=options.versions,
    )


@hookimpl
def asyncflow_register(registrar: Registrar) -> None:
    """Offer the weight transport `host`."""
    registrar.add(
        "weight_sync",
        "host",
        _host,
        api_version=1,
        options=HostOptions,
        capabilities=_capabilities,
    )
