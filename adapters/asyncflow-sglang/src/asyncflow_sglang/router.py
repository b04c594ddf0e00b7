"""An sglang-router in front of the servers: whether it is there, and what it knows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from asyncflow_core.errors import EngineError
from asyncflow_sglang.http import Http, RefusedError, UnreachableError

__all__ = ["wait_for_router"]

_log = logging.getLogger(__name__)
_LOOK_S = 0.2
_CALL_S = 10.0


async def wait_for_router(http: Http, servers: Iterable[str], *, timeout_s: float) -> None:
    """Return when it answers.

    Args:
        http: its address.
        servers: addresses of the servers that this rollout knows.
        timeout_s: how long to wait for it.

    Raises:
        EngineError: it did not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            await http.get("/health", timeout_s=_CALL_S)
            break
        except (RefusedError, UnreachableError) as error:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"router {http.url} is not up after {timeout_s:g} s ({error}); start it, or "
                    f"leave router out: requests then go to the servers themselves",
                    service=http.url,
                ) from error
        await asyncio.sleep(_LOOK_S)
    try:
        found = await http.get("/workers", timeout_s=_CALL_S)
        strange = {str(worker["url"]).rstrip("/") for worker in found["workers"]} - set(servers)
    except (RefusedError, UnreachableError, KeyError, TypeError) as error:
        _log.warning("router %s does not tell its workers: %r", http.url, error)
        return
    if strange:
        _log.warning(
            "router %s sends requests to %s too, which are none of addresses %s: tokens of "
            "theirs would be thrown away",
            http.url,
            ", ".join(sorted(strange)),
            ", ".join(servers),
        )
