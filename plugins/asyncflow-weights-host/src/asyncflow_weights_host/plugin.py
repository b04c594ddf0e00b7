"""Registration."""

from __future__ import annotations

from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registrar
from asyncflow_core.services.weight_sync import WeightSync, WeightSyncCapabilities
from asyncflow_weights_host.options import DiskOptions, HostOptions, ZmqOptions

__all__ = ["asyncflow_register"]

_HERE = frozenset({"process", "host"})
_ANYWHERE = _HERE | {"network"}
_LOOPBACK = ("tcp://127.", "tcp://[::1]:")


def _host(options: HostOptions, ctx: PartContext) -> WeightSync:
    from asyncflow_weights_host.service import HostWeightSync

    return HostWeightSync(options, ctx)


def _zmq(options: ZmqOptions, ctx: PartContext) -> WeightSync:
    from asyncflow_weights_host.zmq_service import ZmqWeightSync

    return ZmqWeightSync(options, ctx)


def _disk(options: DiskOptions, ctx: PartContext) -> WeightSync:
    from asyncflow_weights_host.disk_service import DiskWeightSync

    return DiskWeightSync(options, ctx)


def _capabilities(options: HostOptions) -> WeightSyncCapabilities:
    return WeightSyncCapabilities(
        localities=_HERE,
        source="buckets",
        concurrent_versions=options.versions,
        overlapped_fetch=True,
    )


def _zmq_capabilities(options: ZmqOptions) -> WeightSyncCapabilities:
    private = options.listen == "ipc" or options.listen.startswith(_LOOPBACK)
    return WeightSyncCapabilities(
        localities=_HERE if private else _ANYWHERE,
        source="buckets",
        concurrent_versions=options.versions,
    )


def _disk_capabilities(options: DiskOptions) -> WeightSyncCapabilities:
    return WeightSyncCapabilities(
        localities=_HERE if options.directory is None else _ANYWHERE,
        source=options.source,
        concurrent_versions=options.versions,
    )


@hookimpl
def asyncflow_register(registrar: Registrar) -> None:
    """Offer the weight transports `host`, `zmq` and `disk`."""
    for name, factory, options, capabilities in (
        ("host", _host, HostOptions, _capabilities),
        ("zmq", _zmq, ZmqOptions, _zmq_capabilities),
        ("disk", _disk, DiskOptions, _disk_capabilities),
    ):
        registrar.add(
            "weight_sync",
            name,
            factory,
            api_version=1,
            options=options,
            capabilities=capabilities,
        )
