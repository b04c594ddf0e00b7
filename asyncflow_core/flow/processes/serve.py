"""A service's process: build what the spec says, answer until told to stop or until the run dies.

The spec comes as one line of JSON on standard input, which stays open: when it ends, the run's own
process is gone, and this process ends with its whole process group.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from contextlib import AsyncExitStack
from typing import Any

from pydantic import ValidationError

from asyncflow_core.errors import ConfigError, DataError, InvariantError, PluginError
from asyncflow_core.flow.processes.control import RankControl
from asyncflow_core.flow.processes.host import CONTROLS, Host, build_part
from asyncflow_core.flow.processes.launch import SUPERVISED, BareRole, Life, ProcessSpec
from asyncflow_core.flow.processes.local import FINAL_STATUS
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registry
from asyncflow_core.services.data_store import DataStore
from asyncflow_core.services.rollout import Rollout, SupportsPause, SupportsReadback
from asyncflow_core.services.trainer import SupportsModelExport, Trainer
from asyncflow_core.services.weight_sync import WeightSync
from asyncflow_core.wire import Client, Server, remote, serve_object, serve_service

__all__ = ["INTERFACES", "SUPPORTS", "serve_from_stdin", "serve_until_stopped"]

_log = logging.getLogger(__name__)

_CLOSE_S = 2.0
"""Time a failed service gets to close."""

_FINAL = (InvariantError, ConfigError, DataError, PluginError)
"""What a service that is started again would raise again."""

INTERFACES: dict[str, type[Any]] = {
    "data_store": DataStore,
    "rollout": Rollout,
    "trainer": Trainer,
    "weight_sync": WeightSync,
}
"""The interface of each service kind."""

SUPPORTS: dict[str, tuple[type[Any], ...]] = {
    "rollout": (SupportsPause, SupportsReadback),
    "trainer": (SupportsModelExport,),
}
"""What a service of a kind may offer beyond its interface."""


def serve_from_stdin() -> int:
    """Run the process that a launcher started; returns its exit status."""
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("ASYNCFLOW_LOG_LEVEL", "INFO"),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        spec = ProcessSpec.model_validate_json(sys.stdin.buffer.readline())
    except ValidationError as error:
        raise ConfigError(f"the process spec on standard input is not valid: {error}") from error
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    try:
        return asyncio.run(_serve(spec))
    except Exception as error:  # noqa: BLE001 - logged in full, the launcher shows the last lines
        _log.exception("%s failed", spec.name)
        return _status(error)


def _status(failure: BaseException | None) -> int:
    return FINAL_STATUS if isinstance(failure, _FINAL) else 1


class _Turning(Life):
    """Answers as long as the event loop turns."""

    async def beat(self) -> None:
        """At once."""


def _end_with_the_run() -> None:
    while os.read(0, 1):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # with whatever an engine started
    os._exit(1)


async def _serve(spec: ProcessSpec) -> int:
    async with AsyncExitStack() as stack:
        registry = Registry()
        store = await _connect_store(spec, registry, stack)

        async def connect(address: str, name: str) -> RankControl:
            client = Client(
                address,
                name=spec.name,
                token=spec.token,
                connect_s=600.0,
                heartbeat=SUPERVISED,
            )
            await stack.enter_async_context(client)
            found: RankControl = remote(RankControl, client, name, timeout_s=None)
            return found

        host = Host(spec, store, registry, connect)
        await host.open()
        stack.push_async_callback(host.aclose)
        server = Server(spec.address, name=spec.name, token=spec.token, heartbeat=SUPERVISED)
        turning: Life = _Turning()
        serve_object(server, "life", turning, interface=Life)
        if isinstance(spec.role, BareRole):
            serve_service(
                server,
                spec.name,
                host.control,
                INTERFACES[spec.kind],
                supports=SUPPORTS.get(spec.kind, ()),
            )
        else:
            serve_object(server, spec.name, host.control, interface=CONTROLS[spec.role.role])
        await stack.enter_async_context(server)
        _log.info("%s serves %s at %s", spec.name, spec.plugin or spec.kind, server.address)
        return await serve_until_stopped(host.failed)


async def _connect_store(
    spec: ProcessSpec, registry: Registry, stack: AsyncExitStack
) -> DataStore | None:
    if spec.store_part is not None:
        context = PartContext(name=spec.name, registry=registry)
        own: DataStore = build_part(registry, "data_store", spec.store_part, context)
        return await stack.enter_async_context(own)
    if not spec.store:
        return None
    client = Client(spec.store, name=spec.name, token=spec.token, heartbeat=SUPERVISED)
    await stack.enter_async_context(client)
    # Without a deadline: it answers from the run's own process, and may be stopped with it.
    store: DataStore = remote(DataStore, client, "store", timeout_s=None)
    return await stack.enter_async_context(store)


async def serve_until_stopped(failed: asyncio.Future[None]) -> int:
    """Wait for SIGTERM or SIGINT (status 0) or for the worker's failure, which is logged."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    failed.add_done_callback(lambda _: stop.set())
    await stop.wait()
    if failed.done() and not failed.cancelled() and failed.exception() is not None:
        _log.error("the worker failed", exc_info=failed.exception())
        # The run learns of it by this process's end: an engine that does not close must not delay.
        status = _status(failed.exception())
        timer = threading.Timer(_CLOSE_S, os._exit, (status,))
        timer.daemon = True
        timer.start()
        return status
    return 0
