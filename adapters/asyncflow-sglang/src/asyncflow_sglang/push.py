"""Getting a held version into one server: by its own reading, shared memory, or a broadcast."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from asyncflow_core.errors import EngineError
from asyncflow_core.services.weight_sync import TensorSpec
from asyncflow_sglang.files import Held, batches
from asyncflow_sglang.http import Http, RefusedError
from asyncflow_sglang.options import SGLangOptions

if TYPE_CHECKING:
    from asyncflow_sglang.tensors import BroadcastGroup

__all__ = ["Pusher"]


class Pusher:
    """One server's weights. Every call leaves the server with the version, or raises."""

    def __init__(self, http: Http, options: SGLangOptions) -> None:
        """Keep the arguments."""
        self._http = http
        self._options = options
        self._group: BroadcastGroup | None = None

    async def push(self, held: Held, label: str, *, flush: bool, ranks: int) -> None:
        """Let the server load the version and call it `label`.

        Args:
            held: the version.
            label: its name there.
            flush: drop cached prefixes; refused by a server in whose batch requests stand.
            ranks: tensor parallel ranks of the server.

        Raises:
            RefusedError: the server could not; what it holds now is not known.
            UnreachableError: it did not answer.
            EngineError: the broadcast failed.
        """
        if self._options.update == "disk":
            await self._post(
                "/update_weights_from_disk",
                {
                    "model_path": str(held.path),
                    "load_format": "safetensors",
                    "weight_version": label,
                    "flush_cache": flush,
                },
            )
            return
        parts = list(batches(held, self._options.bucket_bytes))
        async with self._session():
            for number, part in enumerate(parts, 1):
                last = number == len(parts)
                common = {
                    "flush_cache": flush and last,
                    "weight_version": label if last else None,
                }
                if self._options.update == "tensor":
                    await self._tensors(held, part, common, ranks)
                else:
                    await self._broadcast(held, part, common, ranks)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[None]:
        """SGLang takes tensors only between these two calls."""
        try:
            await self._post("/begin_weight_update", {})
        except RefusedError as error:  # one that an earlier failure left open
            try:
                await self._post("/end_weight_update", {})
            except RefusedError:
                raise error from None  # there was none
            await self._post("/begin_weight_update", {})
        yield
        await self._post("/end_weight_update", {})

    async def _tensors(
        self, held: Held, part: Sequence[TensorSpec], common: dict[str, Any], ranks: int
    ) -> None:
        from asyncflow_sglang.tensors import shared

        with shared(held, part) as serialized:
            await self._post(
                "/update_weights_from_tensor",
                {"serialized_named_tensors": [serialized] * ranks, **common},
            )

    async def _broadcast(
        self, held: Held, part: Sequence[TensorSpec], common: dict[str, Any], ranks: int
    ) -> None:
        group = self._group or await self._join(ranks)
        from asyncflow_sglang.tensors import torch_dtype

        body = {
            "names": [spec.name for spec in part],
            "dtypes": [torch_dtype(spec.dtype) for spec in part],
            "shapes": [list(spec.shape) for spec in part],
            "group_name": group.name,
            **common,
        }
        posted = asyncio.create_task(self._post("/update_weights_from_distributed", body))
        sent = asyncio.ensure_future(asyncio.to_thread(group.send, held, part))
        try:
            await asyncio.gather(posted, sent)
        except BaseException as error:
            self._group = None
            posted.cancel()
            await asyncio.gather(posted, return_exceptions=True)
            # A broadcast cannot be cancelled: closing the group ends it.
            group.close()
            await asyncio.gather(sent, return_exceptions=True)
            if isinstance(error, RuntimeError):
                raise EngineError(
                    f"the broadcast of version {held.version} to {self._http.url} failed: {error}",
                    service=self._http.url,
                ) from error
            raise

    async def _join(self, ranks: int) -> BroadcastGroup:
        from asyncflow_sglang.tensors import BroadcastGroup

        group = BroadcastGroup(
            self._options.backend,
            self._options.host,
            ranks + 1,
            timeout_s=self._options.update_timeout_s,
        )
        asked = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": ranks + 1,
            "group_name": group.name,
            "backend": self._options.backend,
        }
        posted = asyncio.create_task(self._post("/init_weights_update_group", asked))
        try:
            await asyncio.gather(posted, _abandonable(group.join))
        except BaseException as error:
            posted.cancel()
            await asyncio.gather(posted, return_exceptions=True)
            group.close()
            if isinstance(error, RuntimeError):
                raise EngineError(
                    f"{self._http.url} did not join the broadcast group at {group.host}:"
                    f"{group.port}: {error}; option host must be this machine's address as servers "
                    f"see it",
                    service=self._http.url,
                ) from error
            raise
        self._group = group
        return group

    async def aclose(self) -> None:
        """Leave the group."""
        await asyncio.to_thread(self.forget)

    def forget(self) -> None:
        """The server is gone, and its group with it."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        await self._http.post(path, body, timeout_s=self._options.update_timeout_s)


async def _abandonable(wait: Callable[[], None]) -> None:
    """A blocking wait of torch, which cannot be cut short: no exit of this process waits for it."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def tell(error: Exception | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def work() -> None:
        found: Exception | None = None
        try:
            wait()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the caller's
            found = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(tell, found)

    threading.Thread(target=work, name="sglang-join", daemon=True).start()
    await ended
