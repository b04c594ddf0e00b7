"""The `sglang` rollout as a service: one replica of AsyncFlow, one to many servers."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

from asyncflow_core.batch import Key
from asyncflow_core.errors import (
    DataError,
    EngineError,
    ServiceClosedError,
    UnsupportedCapabilityError,
)
from asyncflow_core.parts import PartContext
from asyncflow_core.services.rollout import (
    Completion,
    GenerateRequest,
    Rollout,
    RolloutStats,
    StagedWeights,
    SwitchMode,
)
from asyncflow_core.services.weight_sync import WeightSource
from asyncflow_sglang.directory import OwnDirectory, default_parent
from asyncflow_sglang.dispatch import Dispatch
from asyncflow_sglang.http import Http
from asyncflow_sglang.launch import ServerProcess, arguments, environment
from asyncflow_sglang.options import SGLangOptions
from asyncflow_sglang.plugin import capabilities
from asyncflow_sglang.replies import Labels
from asyncflow_sglang.router import wait_for_router
from asyncflow_sglang.running import Requests
from asyncflow_sglang.server import Server
from asyncflow_sglang.trajectory import Limits, Trajectory, check_request, vocabulary
from asyncflow_sglang.weights import Weights

__all__ = ["SGLangRollout"]

_log = logging.getLogger(__name__)
_SAY_S = 30.0
"""Time between two lines about servers that are waited for."""


class SGLangRollout(Rollout):
    """Generates on SGLang servers, which it started or attached to.

    It owns the servers it started, two versions of the weights as files, and the requests: each is
    on one server at a time. What a server loses goes on elsewhere from the tokens that are certain.
    A server takes requests only while it holds, proven, the version that serves; one that comes
    back is given it first. A switch is pause, load, prove, continue, on all servers side by side:

    - drain: running sequences end first, waiting ones start under the new weights;
    - in flight: they stand still meanwhile, and go on in place or after a retraction;
    - abort and resume: they are cut, kept, and sent again with what they have.

    Concurrency: `generate` calls may overlap; staging and committing wait for each other.
    """

    def __init__(self, options: SGLangOptions, context: PartContext) -> None:
        """Keep the arguments."""
        self._options = options
        self._name = context.name or "rollout"
        self._run_dir = context.run_dir
        tokenizer = context.tokenizer
        self._ends = () if tokenizer is None else tuple(tokenizer.eos_token_ids)
        self._capabilities = capabilities(options)
        self._labels = Labels(secrets.token_hex(4))
        self._is_open = False
        self._own: OwnDirectory | None = None
        self._servers: dict[str, Server] = {}
        self._router: Http | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._limits = Limits(0, 0)
        self._dispatch = Dispatch(self._name, options, self._labels, self._servers)
        self._live: dict[Trajectory, asyncio.Task[Completion]] = {}
        self._weights = Weights(self._name, options, self._servers)

    # Life.

    async def open(self) -> None:
        """Start or find the servers.

        Returns when all of them can take requests, or carry weights of another run.

        Raises:
            DataError: the model's files are not sound, or not of the run's tokenizer.
            EngineError: one cannot be used, or did not come up.
        """
        self._is_open = True
        vocab = vocabulary(self._options.model)
        if strange := [end for end in self._ends if end >= vocab]:
            raise DataError(
                f"the run's tokenizer ends responses with token {strange[0]}, and model "
                f"{self._options.model!r} has 0..{vocab - 1}; they do not belong together"
            )
        parent = self._options.directory or self._run_dir or default_parent()
        self._own = await asyncio.to_thread(OwnDirectory, parent)
        await asyncio.to_thread(self._weights.open, self._own.path, vocab)
        key = os.environ.get(self._options.api_key_env, "") if self._options.api_key_env else ""
        self._add_servers(vocab, key)
        for server in self._servers.values():
            await self._start(server)
            watch = asyncio.create_task(server.watch(), name=f"{server.name} watch")
            watch.add_done_callback(partial(_watch_ended, server))
            self._watches.append(watch)
        await self._all_up()
        if self._router is not None:
            limit = self._options.start_timeout_s
            urls = [server.http.url for server in self._servers.values()]
            await wait_for_router(self._router, urls, timeout_s=limit)
        facts = [server.facts for server in self._servers.values() if server.facts is not None]
        tokenizer = not any(found.args.get("skip_tokenizer_init") for found in facts)
        self._limits = Limits(vocab, min(found.input_tokens for found in facts), tokenizer)

    async def _start(self, server: Server) -> None:
        try:
            await server.start()
        except OSError as error:
            raise EngineError(
                f"{server.name} cannot be started: {error}; log_dir is {self._options.log_dir}",
                service=self._name,
            ) from error

    def _add_servers(self, vocab: int, key: str) -> None:
        options = self._options
        # Those that are started get their address with their port, at each start.
        urls = options.addresses or ["http://127.0.0.1"] * options.servers
        https = [Http(url, api_key=key) for url in urls]
        if options.router:
            self._router = Http(options.router, api_key=key)
            self._router.open()
        for number, http in enumerate(https):
            name = f"{self._name}/server-{number}"
            self._dispatch.add(name)
            self._servers[name] = Server(
                name,
                http,
                options=options,
                labels=self._labels,
                vocab=vocab,
                process=None if options.addresses else partial(self._process, number),
                requests=Requests(
                    self._router or http,
                    https if self._router else [http],
                    interval=options.stream_interval,
                ),
                wanted=lambda: self._weights.serving,
                changed=self._dispatch.changed,
            )

    def _process(self, number: int, port: int) -> ServerProcess:
        assert self._own is not None
        log = (self._options.log_dir or self._own.path) / f"{self._name}-server-{number}.log"
        command = arguments(self._options, port, label=self._labels.started)
        return ServerProcess(command, environment(self._options), log)

    async def _all_up(self) -> None:
        """Wait for every server's first readiness, or say why one does not come."""
        said = time.monotonic()
        deadline = said + self._options.start_timeout_s
        while waiting := [server for server in self._servers.values() if not server.known]:
            reasons = "; ".join(server.line for server in waiting)
            if any(server.gone for server in waiting) or time.monotonic() > deadline:
                raise EngineError(f"{self._name} cannot be opened: {reasons}", service=self._name)
            for server in waiting:
                if server.fatal is not None:
                    raise server.fatal
            if time.monotonic() - said > _SAY_S:
                said = time.monotonic()
                _log.warning("%s waits for %s", self._name, reasons)
            await asyncio.sleep(0.05)

    async def aclose(self) -> None:
        """End what was started; calls still waiting raise `ServiceClosedError`."""
        self._is_open = False
        for task in [*self._watches, *self._live.values()]:
            task.cancel()
        await asyncio.gather(*self._watches, *self._live.values(), return_exceptions=True)
        self._watches.clear()
        closing = (server.aclose() for server in self._servers.values())
        found = await asyncio.gather(*closing, return_exceptions=True)
        self._servers.clear()
        router, self._router = self._router, None
        if router is not None:
            await router.aclose()
        own, self._own = self._own, None
        if own is not None:
            await asyncio.to_thread(own.remove)
        for error in found:
            if error is not None:
                raise error

    def _opened(self) -> None:
        if not self._is_open:
            raise ServiceClosedError(f"{self._name} is not open", service=self._name)

    # Requests.

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Sample; see `Rollout.generate`.

        Raises:
            DataError: a request the servers cannot take, named by its key; none is started.
            EngineError: the servers failed it.
            ServiceTimeoutError: no server could take it in `wait_s`.
        """
        self._opened()
        for request in requests:
            self._check(request)
        ended: asyncio.Queue[Trajectory] = asyncio.Queue()
        pending = [Trajectory(request, self._ends) for request in requests]
        for trajectory in pending:
            task = asyncio.create_task(self._dispatch.run(trajectory))
            self._live[trajectory] = task
            task.add_done_callback(lambda _, done=trajectory: ended.put_nowait(done))  # type: ignore[misc]
        try:
            for _ in requests:
                trajectory = await ended.get()
                yield self._result(trajectory)
        finally:
            tasks = [self._live.pop(t) for t in pending if t in self._live]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _result(self, trajectory: Trajectory) -> Completion:
        task = self._live.pop(trajectory)
        if task.cancelled():
            self._opened()
            raise EngineError(f"request {trajectory.request.key} was cancelled")
        return task.result()

    def _check(self, request: GenerateRequest) -> None:
        check_request(request, self._limits)
        if request.sampling.stop and "stop" not in self._capabilities.sampling:
            raise UnsupportedCapabilityError(
                f"{self._name} knows no stop strings: its servers have no tokenizer "
                f"(skip_tokenizer_init); use stop_token_ids",
                service=self._name,
            )

    async def abort(self, keys: Sequence[Key] | None = None) -> int:
        """End requests, running or waiting, with what they have."""
        self._opened()
        wanted = None if keys is None else set(keys)
        chosen = {
            trajectory
            for trajectory, task in self._live.items()
            if not task.done()
            and not trajectory.aborted
            and (wanted is None or trajectory.request.key in wanted)
        }
        self._dispatch.withdraw(chosen)
        await asyncio.gather(*(server.requests.end(chosen) for server in self._servers.values()))
        return len(chosen)

    async def pause(self) -> None:
        """Stop producing tokens at the next token boundary; everything is kept."""
        self._opened()
        await asyncio.gather(*(server.pause() for server in self._servers.values()))

    async def resume(self) -> None:
        """Go on."""
        self._opened()
        await asyncio.gather(*(server.resume() for server in self._servers.values()))

    # Weights.

    async def stage_weights(self, source: WeightSource) -> StagedWeights:
        """Keep a version in files of this rollout's own, while generating.

        Raises:
            DataError: the tensors are not the model's, or the source fell short.
            EngineError: they cannot be written.
        """
        self._opened()
        return await self._weights.stage(source)

    async def commit_weights(self, version: int, mode: SwitchMode) -> None:
        """Let the staged version serve; see `Rollout.commit_weights` and the class.

        A server that fails to take it takes no requests until it was brought up to it; all failing
        is an error, and the servers are brought back to the version before.

        Raises:
            ServiceError: `version` is not what is staged.
            EngineError: no server could be brought to it.
        """
        self._opened()
        await self._weights.commit(version, SwitchMode(mode), self._all_idle)

    async def _all_idle(self) -> None:
        """Behind a router, nobody knows whose requests run where: until all have ended."""
        if self._router is not None:
            await asyncio.gather(*(s.requests.drained() for s in self._servers.values()))

    async def stats(self) -> RolloutStats:
        """Load and work."""
        self._opened()
        servers = list(self._servers.values())
        return RolloutStats(
            version=self._weights.version,
            running=sum(len(server.requests) for server in servers),
            waiting=self._dispatch.waiting,
            tokens_generated=sum(server.requests.tokens for server in servers),
            busy_s=max((server.requests.busy_s for server in servers), default=0.0),
            tokens_kept=self._dispatch.kept,
            tokens_lost=self._dispatch.lost + sum(server.requests.lost for server in servers),
        )


def _watch_ended(server: Server, watch: asyncio.Task[None]) -> None:
    error = None if watch.cancelled() else watch.exception()
    if error is not None:
        server.give_up(error)
