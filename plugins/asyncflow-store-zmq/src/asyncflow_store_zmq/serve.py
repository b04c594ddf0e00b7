"""Entry of a store's processes: `python -m asyncflow_store_zmq.serve controller|shard NUMBER`.

The spec comes as one line on standard input, which stays open: when it ends, whoever started the
store is gone, and so are its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import threading

from asyncflow_core.errors import AsyncFlowError
from asyncflow_core.wire import Server, split_key
from asyncflow_store_zmq.controller import Controller
from asyncflow_store_zmq.shard import Shard
from asyncflow_store_zmq.spec import StoreSpec

__all__ = ["main"]

_log = logging.getLogger(__name__)


def main() -> int:
    """Serve until told to stop; returns the exit status."""
    logging.basicConfig(
        stream=sys.stderr, level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    spec = StoreSpec.load(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    role, *rest = sys.argv[1:]
    try:
        asyncio.run(_controller(spec) if role == "controller" else _shard(spec, int(rest[0])))
    except AsyncFlowError as error:
        _say(json.dumps([error.code, str(error)]))
        _log.error("the %s of a store ends: %s", role, error)
        return 1
    except Exception:  # noqa: BLE001 - logged in full; whoever started it sees its end
        _log.exception("the %s of a store failed", role)
        return 1
    return 0


def _say(line: str) -> None:
    """To who started it: the address, or why there is none."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _end_with_the_starter() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


async def _controller(spec: StoreSpec) -> None:
    controller = Controller(spec)
    await controller.open()
    server = spec.server(split_key(spec.address)[0], name="store")
    controller.expose(server)
    try:
        await _serve(server)
    finally:
        await controller.aclose()


async def _shard(spec: StoreSpec, number: int) -> None:
    server = spec.server(spec.shard_address(number), name=f"shard-{number}")
    Shard(spec, number).expose(server)
    await _serve(server)


async def _serve(server: Server) -> None:
    # Rows are millions of objects and hardly a cycle: a collection that looks at all of them would
    # stand in everybody's way.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with server:
        _say(server.address)
        await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
