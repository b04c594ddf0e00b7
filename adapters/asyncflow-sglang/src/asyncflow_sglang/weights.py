"""Versions of the weights: held as files, given to all servers, taken away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from asyncflow_core.errors import AsyncFlowError, EngineError, ServiceClosedError, ServiceError
from asyncflow_core.services.rollout import StagedWeights, SwitchMode
from asyncflow_core.services.weight_sync import TensorSpec, WeightSource
from asyncflow_sglang.files import Held, Writer, expected_tensors, held_model, link_files
from asyncflow_sglang.http import RefusedError, UnreachableError
from asyncflow_sglang.options import SGLangOptions
from asyncflow_sglang.proof import Proof
from asyncflow_sglang.server import Server
from asyncflow_sglang.sources import buckets_of

__all__ = ["Weights"]

_log = logging.getLogger(__name__)
_LOOK_S = 0.05


class Weights:
    """Holds what serves and what is staged.

    Concurrency: staging and committing wait for each other.

    Attributes:
        version: of what serves.
    """

    def __init__(self, name: str, options: SGLangOptions, servers: Mapping[str, Server]) -> None:
        """Keep the arguments; `servers` may grow and shrink."""
        self.version = 0
        self._name = name
        self._options = options
        self._servers = servers
        self._serving: Proof | None = None
        self._staged: Proof | None = None
        self._vocab = 0
        self._root: Path | None = None
        self._expected: list[TensorSpec] = []
        self._update = asyncio.Lock()

    def open(self, root: Path, vocab: int) -> None:
        """Versions will lie in `root`. Blocking.

        Raises:
            DataError: the model's own files are not sound.
        """
        self._root, self._vocab = root, vocab
        self._expected = expected_tensors(self._options.model)
        self._serving = self._proof(held_model(self._options.model))

    @property
    def serving(self) -> Proof:
        """What every server is to hold: before the first commit, the model's own weights."""
        if self._serving is None:
            raise ServiceClosedError(f"{self._name} is not open", service=self._name)
        return self._serving

    def _proof(self, held: Held) -> Proof:
        return Proof(held, model=self._options.model, how=self._options.verify, vocab=self._vocab)

    async def stage(self, source: WeightSource) -> StagedWeights:
        """Take a version into files; see `Rollout.stage_weights`."""
        async with self._update:
            start = time.perf_counter()
            if self._root is None:
                raise ServiceClosedError(f"{self._name} is not open", service=self._name)
            try:
                held = await self._take(self._root, source)
            except OSError as error:
                raise EngineError(
                    f"{self._name} cannot hold version {source.manifest.version} in {self._root}: "
                    f"{error}",
                    service=self._name,
                ) from error
            proof = self._proof(held)
            try:
                for server in self._servers.values():
                    if server.facts is not None:
                        await proof.prepare(server.facts.args, server.facts.input_tokens)
            except BaseException:
                await asyncio.to_thread(held.remove)
                raise
            if self._staged is not None:
                await asyncio.to_thread(self._staged.held.remove)
            self._staged = proof
            wall_s = time.perf_counter() - start
            return StagedWeights(held.version, held.checksum, held.nbytes, wall_s)

    async def _take(self, root: Path, source: WeightSource) -> Held:
        manifest = source.manifest
        if source.kind == "path" and source.path is not None:
            return await asyncio.to_thread(link_files, root, source.path, manifest, self._expected)
        writer = await asyncio.to_thread(Writer, root, manifest, self._expected)
        try:
            async with contextlib.aclosing(buckets_of(source)) as buckets:
                async for bucket in buckets:
                    await asyncio.to_thread(writer.add, bucket)
            return await asyncio.to_thread(writer.finish)
        except BaseException:
            await asyncio.to_thread(writer.abort)
            raise

    async def commit(
        self, version: int, mode: SwitchMode, idle: Callable[[], Awaitable[None]]
    ) -> None:
        """Let every server serve what is staged; see `Rollout.commit_weights`.

        Args:
            version: as staged.
            mode: what becomes of running requests.
            idle: see `Server.switch`.
        """
        async with self._update:
            staged = self._staged
            if staged is None or staged.held.version != version:
                raise ServiceError(
                    f"{self._name} cannot commit version {version}: staged is "
                    f"{None if staged is None else staged.held.version}",
                    service=self._name,
                )
            before, self._serving = self.serving, staged
            try:
                await self._switch(staged, mode, idle)
            except BaseException:
                self._serving = before
                for server in self._servers.values():  # one may hold the version already
                    server.reconsider()
                raise
            self._staged, self.version = None, version
            await asyncio.to_thread(before.held.remove)

    async def _switch(
        self, proof: Proof, mode: SwitchMode, idle: Callable[[], Awaitable[None]]
    ) -> None:
        held = proof.held
        up = [server for server in self._servers.values() if server.usable]
        for server in up:  # before anything else runs: what comes now is for the new weights
            server.expect_switch()
        try:
            found = await asyncio.gather(
                *(server.switch(proof, mode, idle) for server in up), return_exceptions=True
            )
        finally:
            for server in up:
                server.switching = False
                server.reconsider()
        errors: list[BaseException] = []
        for server, error in zip(up, found, strict=True):
            if error is None:
                continue
            if not isinstance(error, RefusedError | UnreachableError | AsyncFlowError | OSError):
                raise error
            _log.warning("%s did not take version %d: %s", server.name, held.version, error)
            errors.append(error)
        if len(errors) < len(up):
            return
        if errors:
            raise EngineError(
                f"{self._name}: no server took version {held.version}: "
                f"{'; '.join(map(str, errors))}",
                service=self._name,
            ) from errors[0]
        await self._some_up(held)

    async def _some_up(self, held: Held) -> None:
        """No server was up: the first that comes is brought to the version by its watch."""
        deadline = time.monotonic() + self._options.update_timeout_s
        while not any(server.holds(held.version) for server in self._servers.values()):
            gone = all(server.gone for server in self._servers.values())
            if gone or time.monotonic() > deadline:
                lines = "; ".join(server.line for server in self._servers.values())
                raise EngineError(
                    f"{self._name}: no server is up to take version {held.version}: {lines}",
                    service=self._name,
                )
            await asyncio.sleep(_LOOK_S)
