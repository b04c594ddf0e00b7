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
    AsyncFlowError,
    DataError,
    EngineError,
    PeerLostError,
    ServiceClosedError,
    ServiceTimeoutError,
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
from asyncflow_sglang.http import Http, RefusedError, UnreachableError
from asyncflow_sglang.launch import ServerProcess, arguments, environment, free_port
from asyncflow_sglang.options import SGLangOptions
from asyncflow_sglang.plugin import capabilities
from asyncflow_sglang.replies import Finish, Labels, Segment
from asyncflow_sglang.routing import Placement, Routing
from asyncflow_sglang.running import Requests
from asyncflow_sglang.server import Server
from asyncflow_sglang.trajectory import Limits, Trajectory, check_request, vocabulary
from asyncflow_sglang.weights import Weights

__all__ = ["SGLangRollout"]

_log = logging.getLogger(__name__)
_SAY_S = 30.0
"""Time between two warnings about requests that no server takes."""
_TRIES = 30
"""Attempts at one request, one after another, that may yield nothing."""


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
        self._routing = Routing(options.slots, options.affinity_slack)
        self._places: dict[Trajectory, asyncio.Future[str | None]] = {}
        self._live: dict[Trajectory, asyncio.Task[Completion]] = {}
        self._weights = Weights(self._name, options, self._servers)
        self._kept = self._lost = 0

    # Life.

    async def open(self) -> None:
        """Start or find the servers.

        Returns when all of them can take requests, or carry weights of another run.

        Raises:
            EngineError: one cannot be used, or did not come up.
        """
        self._is_open = True
        vocab = vocabulary(self._options.model)
        parent = self._options.directory or self._run_dir or default_parent()
        self._own = await asyncio.to_thread(OwnDirectory, parent)
        await asyncio.to_thread(self._weights.open, self._own.path, vocab)
        key = os.environ.get(self._options.api_key_env, "") if self._options.api_key_env else ""
        self._add_servers(vocab, key)
        for server in self._servers.values():
            await server.start()
            self._watches.append(asyncio.create_task(server.watch(), name=f"{server.name} watch"))
        await self._all_up()
        tokens = min(server.facts.input_tokens for server in self._servers.values())
        tokenizer = not any(s.facts.args.get("skip_tokenizer_init") for s in self._servers.values())
        self._limits = Limits(vocab, tokens, tokenizer)

    def _add_servers(self, vocab: int, key: str) -> None:
        options = self._options
        ports = [] if options.addresses else [free_port() for _ in range(options.servers)]
        urls = options.addresses or [f"http://127.0.0.1:{port}" for port in ports]
        https = [Http(url, api_key=key) for url in urls]
        if options.router:
            self._router = Http(options.router, api_key=key)
            self._router.open()
        for number, http in enumerate(https):
            name = f"{self._name}/server-{number}"
            self._routing.add(name)
            self._servers[name] = Server(
                name,
                http,
                options=options,
                labels=self._labels,
                vocab=vocab,
                process=partial(self._process, number, ports[number]) if ports else None,
                requests=Requests(
                    self._router or http,
                    https if self._router else [http],
                    interval=options.stream_interval,
                ),
                wanted=lambda: self._weights.serving,
                changed=self._server_changed,
            )

    def _process(self, number: int, port: int) -> ServerProcess:
        assert self._own is not None
        log = (self._options.log_dir or self._own.path) / f"{self._name}-server-{number}.log"
        return ServerProcess(arguments(self._options, port), environment(self._options), log)

    async def _all_up(self) -> None:
        """Wait for every server's first readiness, or say why one does not come."""
        deadline = time.monotonic() + self._options.start_timeout_s
        while waiting := [server for server in self._servers.values() if not server.known]:
            reasons = "; ".join(server.line for server in waiting)
            if any(server.gone for server in waiting) or time.monotonic() > deadline:
                raise EngineError(f"{self._name} cannot be opened: {reasons}", service=self._name)
            for server in waiting:
                if server.fatal is not None:
                    raise server.fatal
            await asyncio.sleep(0.05)

    async def aclose(self) -> None:
        """End what was started; calls still waiting raise `ServiceClosedError`."""
        self._is_open = False
        for task in [*self._watches, *self._live.values()]:
            task.cancel()
        await asyncio.gather(*self._watches, *self._live.values(), return_exceptions=True)
        self._watches.clear()
        await asyncio.gather(*(server.aclose() for server in self._servers.values()))
        self._servers.clear()
        router, self._router = self._router, None
        if router is not None:
            await router.aclose()
        own, self._own = self._own, None
        if own is not None:
            await asyncio.to_thread(own.remove)

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
            task = asyncio.create_task(self._run(trajectory))
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

    async def _run(self, trajectory: Trajectory) -> Completion:
        """From server to server until it ends."""
        futile = 0
        while not trajectory.aborted:
            name = await self._place(trajectory)
            if name is None:
                break
            try:
                segment = await self._servers[name].serve(trajectory)
            except RefusedError as error:
                raise self._refused(trajectory, error, name) from error
            finally:
                self._deal(self._routing.done(trajectory))
            self._take(trajectory, segment, self._servers.get(name))
            finish = segment.finish
            if finish is not None and finish.kind != "abort":
                return self._completed(trajectory, finish.kind)
            if not trajectory.left:  # it was cut at its very end
                return self._completed(trajectory, "length")
            futile = 0 if segment.ids else futile + 1
            if finish is not None and finish.status:
                self._ended_by_itself(trajectory, finish, name)
            if futile > _TRIES:
                raise EngineError(
                    f"request {trajectory.request.key} got no token in {futile} attempts; the last "
                    f"was on {self._servers[name].line if name in self._servers else name}",
                    service=self._name,
                )
            if futile:
                await asyncio.sleep(0.1 * futile)
        return self._completed(trajectory, "abort")

    def _completed(self, trajectory: Trajectory, reason: str) -> Completion:
        self._kept += trajectory.kept
        return trajectory.completion(reason)

    def _take(self, trajectory: Trajectory, segment: Segment, server: Server | None) -> None:
        """Add what a server made, if all of it came from weights of this rollout."""
        runs = [(self._labels.version(label), count) for label, count in segment.spans]
        known = [(version, count) for version, count in runs if version is not None]
        if len(known) == len(runs):
            trajectory.extend(segment.ids, segment.logprobs, known)
            return
        self._lost += len(segment.ids)
        segment.finish = None
        if server is not None:
            server.foreign(segment.spans)

    def _refused(self, trajectory: Trajectory, error: RefusedError, name: str) -> AsyncFlowError:
        message = f"request {trajectory.request.key}: {name} refuses it: {error}"
        if error.status == 400:
            return DataError(message)
        return EngineError(message, service=self._name)

    def _ended_by_itself(self, trajectory: Trajectory, finish: Finish, name: str) -> None:
        """The server ended it of its own accord: it is full, or out of memory, or will not."""
        message = (
            f"request {trajectory.request.key}: {name} ended it with status {finish.status}: "
            f"{finish.message}"
        )
        if finish.status == 400:
            raise DataError(message)
        _log.warning("%s; it is tried again", message)

    async def _place(self, trajectory: Trajectory) -> str | None:
        """The server it goes to; None if it was aborted while it waited."""
        future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._places[trajectory] = future
        prefix = trajectory.request.prompt_ids.tobytes()
        self._deal(self._routing.submit(trajectory, prefix))
        start = said = time.monotonic()
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=1.0)
                now = time.monotonic()
                if future.done() or self._routing.any_open:
                    start = now
                    continue
                self._check_hope(trajectory, now - start)
                if now - said >= _SAY_S:
                    said = now
                    _log.warning("%s", self._waits_for(now - start))
            return future.result()
        except BaseException:
            self._deal(self._routing.done(trajectory))
            raise
        finally:
            del self._places[trajectory]

    def _check_hope(self, trajectory: Trajectory, waited: float) -> None:
        """Raise if no server will come, or none came for too long."""
        if self._servers and all(server.gone for server in self._servers.values()):
            raise PeerLostError(
                f"{self._name} has no server left: {self._lines()}", service=self._name
            )
        if waited > self._options.wait_s:
            raise ServiceTimeoutError(
                f"request {trajectory.request.key}: {self._waits_for(waited)}; the limit is wait_s "
                f"{self._options.wait_s:g}",
                service=self._name,
            )

    def _waits_for(self, waited: float) -> str:
        return (
            f"{self._routing.waiting} requests of {self._name} wait since {waited:.0f} s for a "
            f"server: {self._lines()}"
        )

    def _lines(self) -> str:
        return "; ".join(server.line for server in self._servers.values())

    def _deal(self, placements: Sequence[Placement]) -> None:
        for trajectory, server in placements:
            future = self._places.get(trajectory)  # type: ignore[call-overload]
            if future is not None and not future.done():
                future.set_result(server)

    def _server_changed(self, server: Server) -> None:
        if server.ready:
            self._deal(self._routing.open(server.name))
        else:
            self._routing.close(server.name)

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
        for trajectory in chosen:
            trajectory.aborted = True
            future = self._places.get(trajectory)
            if future is not None and not future.done():
                future.set_result(None)
                self._deal(self._routing.done(trajectory))
        await asyncio.gather(*(server.requests.end(chosen) for server in self._servers.values()))
        return len(chosen)

    async def pause(self) -> None:
        """Stop producing tokens at the next token boundary; everything is kept."""
        self._opened()
        await self._each("pause", [server.pause() for server in self._servers.values()])

    async def resume(self) -> None:
        """Go on."""
        self._opened()
        await self._each("resume", [server.resume() for server in self._servers.values()])

    async def _each(self, what: str, calls: Sequence[object]) -> None:
        found = await asyncio.gather(*calls, return_exceptions=True)  # type: ignore[call-overload]
        for error in found:
            if isinstance(error, RefusedError | UnreachableError):
                raise EngineError(
                    f"{self._name} cannot {what}: {error}", service=self._name
                ) from error
            if isinstance(error, BaseException):
                raise error

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
            waiting=self._routing.waiting,
            tokens_generated=sum(server.requests.tokens for server in servers),
            busy_s=max((server.requests.busy_s for server in servers), default=0.0),
            tokens_kept=self._kept,
            tokens_lost=self._lost + sum(server.requests.lost for server in servers),
        )
