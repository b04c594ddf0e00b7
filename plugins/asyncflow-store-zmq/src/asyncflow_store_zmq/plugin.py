"""Registration."""

from __future__ import annotations

from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registrar
from asyncflow_core.services.data_store import DataStore, DataStoreCapabilities
from asyncflow_store_zmq.options import ZmqOptions

__all__ = ["asyncflow_register"]


def _store(options: ZmqOptions, ctx: PartContext) -> DataStore:
    from asyncflow_store_zmq.store import ZmqDataStore

    return ZmqDataStore(options, name=ctx.name, run_dir=ctx.run_dir)


def _capabilities(options: ZmqOptions) -> DataStoreCapabilities:
    from asyncflow_store_zmq.store import capabilities

    return capabilities(options)


@hookimpl
def asyncflow_register(registrar: Registrar) -> None:
    """Offer the data store `zmq`."""
    registrar.add(
        "data_store",
        "zmq",
        _store,
        api_version=1,
        options=ZmqOptions,
        capabilities=_capabilities,
    )
