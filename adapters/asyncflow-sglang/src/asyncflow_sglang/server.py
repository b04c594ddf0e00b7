"""One server: its process, health, requests and weights.

Concurrency: everything that changes the server's weights or pauses it holds `control`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from asyncflow_core.errors import AsyncFlowError, EngineError
from asyncflow_core.services.rollout import SwitchMode
from asyncflow_sglang import probe
from asyncflow_sglang._compat import check_version
from asyncflow_sglang.health import Health, State
from asyncflow_sglang.http import Http, RefusedError, UnreachableError
from asyncflow_sglang.launch import ServerProcess
from asyncflow_sglang.options import SGLangOptions
from asyncflow_sglang.proof import Proof
from asyncflow_sglang.push import Pusher
from asyncflow_sglang.replies import Labels, Segment
from asyncflow_sglang.running import Requests
from asyncflow_sglang.trajectory import Trajectory

__all__ = ["Server"]

_log = logging.getLogger(__name__)
_CALL_S = 30.0
"""Deadline of small control calls: pause, continue, abort."""


@dataclass(slots=True)
class Facts:
    """What a server says of itself."""

    args: dict[str, Any] = field(default_factory=dict)
    input_tokens: int = 0
    ranks: int = 1


class Server:
    """A server this rollout attached to or started.

    Args:
        name: in errors and logs.
        http: its address.
        options: of the rollout.
        labels: names of versions.
        vocab: size of the vocabulary.
        process: makes its process; None for one that runs already.
        requests: those it serves.
        wanted: the weights it should serve, None for those it came with.
        changed: called when it may take requests, or may no longer.
    """

    def __init__(
        self,
        name: str,
        http: Http,
        *,
        options: SGLangOptions,
        labels: Labels,
        vocab: int,
        process: Callable[[], ServerProcess] | None,
        requests: Requests,
        wanted: Callable[[], Proof | None],
        changed: Callable[[Server], None],
    ) -> None:
        self.name = name
        self.http = http
        self.health = Health(time.monotonic())
        self.facts = Facts()
        self.greeted = False
        self.fatal: AsyncFlowError | None = None
        self.control = asyncio.Lock()
        self.requests = requests
        self.paused = False
        self._options = options
        self._labels = labels
        self._vocab = vocab
        self._make_process = process
        self._process: ServerProcess | None = None
        self._starts = 0
        self._wanted = wanted
        self._changed = changed
        self._pusher = Pusher(http, options)
        self._switching = False
        self._defined = False
        self._nudge = asyncio.Event()

    # Life.

    async def start(self) -> None:
        """Start its process, where it is ours."""
        self.http.open()
        await self._start_process()

    async def _start_process(self) -> None:
        if self._make_process is not None:
            self._starts += 1
            self._process = self._make_process()
            await self._process.start()

    async def aclose(self) -> None:
        """Cut its requests; end it, where it is ours."""
        self.requests.cut()
        if self._process is None and self.paused:
            with contextlib.suppress(RefusedError, UnreachableError):
                await self._continue()
        await self.http.aclose()
        await self._pusher.aclose()
        if self._process is not None:
            await self._process.stop()

    @property
    def ready(self) -> bool:
        """Whether it may take requests."""
        return self.health.state is State.READY and not self._switching and not self.paused

    @property
    def known(self) -> bool:
        """Whether it is ready, or usable but for the weights it carries."""
        return self.ready or (self.greeted and self.fatal is not None)

    @property
    def usable(self) -> bool:
        """Whether it can be given weights now, while requests run on it."""
        return self.health.state is State.READY

    def foreign(self, spans: list[tuple[str, int]]) -> None:
        """It served weights that are not of this rollout."""
        self.health.doubted(f"it made tokens with the weights {spans}", time.monotonic())
        self.requests.doubt()
        self._changed(self)
        self._nudge.set()

    @property
    def gone(self) -> bool:
        """Whether nothing will bring it back."""
        return (
            self._process is not None
            and self.health.state is State.LOST
            and self._starts > self._options.restarts
        )

    @property
    def line(self) -> str:
        """Its state, in words."""
        since = time.monotonic() - self.health.now
        return f"{self.name} ({self.http.url}) is {self.health.state} since {since:.0f} s" + (
            f": {self.health.reason}" if self.health.reason else ""
        )

    async def watch(self) -> None:
        """Look at it until cancelled; bring it up, to the current weights, and up again."""
        while not self.gone:
            before = self.health.state
            await self._look()
            if self.health.state is State.LOST and before is not State.LOST:
                await self._lose()
            elif self.health.state is State.STALE and not self.control.locked():
                await self._bring_up()
            self._nudge.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.poll_s):
                    await self._nudge.wait()

    async def _look(self) -> None:
        now = time.monotonic
        if self._process is not None and (ended := self._process.ended):
            self.health.lost(ended, now())
            return
        try:
            info = await self.http.get("/model_info", timeout_s=self._options.poll_timeout_s)
            if not self._switching:
                before = self.health.state
                self.health.answered(str(info["weight_version"]), now())
                if before is State.READY and self.health.state is State.STALE:
                    self.requests.doubt()
        except UnreachableError as error:
            self.health.missed(str(error), now(), refused=error.refused)
        except (RefusedError, TypeError, KeyError) as error:
            self.health.missed(f"/model_info: {error!r}", now(), refused=False)
        self._check_deadlines()
        self._changed(self)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        age, limit = now - self.health.now, self._options.start_timeout_s
        if self.health.state is State.STARTING and self._process is not None and age > limit:
            lines = self._process.last_lines()
            self.health.lost(f"it did not answer within {limit:g} s; {lines}", now)
        quiet, requests = now - self.requests.last_token, len(self.requests)
        if requests and self.ready and quiet > self._options.stall_s:
            words = f"it has {requests} requests and gave no token for {quiet:.0f} s"
            self.health.lost(words, now)

    async def _lose(self) -> None:
        """Give its requests back and start it again, where it is ours."""
        _log.warning("%s", self.line)
        self._changed(self)
        self.requests.cut()
        self._defined = False
        self._pusher.forget()
        if self._process is None:
            return
        await self._process.stop()
        if self.gone:
            _log.error("%s ended for the %d. time and is given up", self.name, self._starts)
            return
        self.health.restarted(time.monotonic())
        await self._start_process()

    async def _bring_up(self) -> None:
        async with self.control:
            try:
                await self._greet()
                proof = self._wanted()
                if proof is not None:
                    await self._replace(proof, keep_running=False)
                else:
                    await self._adopt()
                self.fatal = None
            except (RefusedError, UnreachableError, AsyncFlowError) as error:
                self.fatal = error if isinstance(error, AsyncFlowError) else None
                reason = f"it cannot be brought up: {error}"
                level = logging.DEBUG if reason == self.health.reason else logging.WARNING
                _log.log(level, "%s: %s", self.name, reason)
                self.health.doubted(reason, time.monotonic())
        self._changed(self)

    async def _greet(self) -> None:
        """Learn what it is; `EngineError` if it cannot be used."""
        info = await self.http.get("/server_info", timeout_s=_CALL_S)
        check_version(str(info.get("version", "")), server=self.name)
        state = (info.get("internal_states") or [{}])[0]
        if int(info.get("tokenizer_worker_num") or 1) != 1:
            raise EngineError(
                f"{self.name} runs {info['tokenizer_worker_num']} tokenizer workers, allowed: 1; "
                f"with more, a pause and an update reach different ones and wait for each other",
                service=self.name,
            )
        ranks = int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1)
        self.facts = Facts({**info, **state}, int(info["max_req_input_len"]), ranks)
        if not self._defined:  # later it may stand paused, with half a version in it
            await self._continue()
            limit = self._options.update_timeout_s
            await probe.check_definition(self.http, self._prompt(), timeout_s=limit)
            self._defined = self.greeted = True

    def _prompt(self) -> list[int]:
        return probe.fixed_prompt(self._vocab, self.facts.input_tokens)

    async def _adopt(self) -> None:
        """Take the weights it came with for version 0."""
        info = await self.http.get("/model_info", timeout_s=_CALL_S)
        label, own = str(info["weight_version"]), self._labels.of(0)
        if label not in ("default", own):
            raise EngineError(
                f"{self.name} serves weights {label!r}, of another run; it waits for the first "
                f"commit of this one",
                service=self.name,
            )
        named = {"new_version": own, "abort_all_requests": False}
        await self.http.post("/update_weight_version", named, timeout_s=_CALL_S)
        self.health.confirmed(own, time.monotonic())

    async def serve(self, trajectory: Trajectory) -> Segment:
        """Go on with a request here; see `Requests.serve`."""
        seeds = bool(self.facts.args.get("enable_deterministic_inference"))
        segment = await self.requests.serve(trajectory, self.health.label or "", seeds=seeds)
        if segment.finish is None:
            self._nudge.set()
        return segment

    # Pausing and weights.

    async def pause(self) -> None:
        """Stand still at the next token, everything kept."""
        async with self.control:
            self.paused = True
            self._changed(self)
            if self.health.state is State.READY:
                await self._post("/pause_generation", {"mode": "in_place"})
                await self.requests.settled()

    async def resume(self) -> None:
        """Go on."""
        async with self.control:
            await self._continue()
            self.paused = False
            self.requests.last_token = time.monotonic()
        self._changed(self)

    async def switch(
        self, proof: Proof, mode: SwitchMode, idle: Callable[[], Awaitable[None]]
    ) -> None:
        """Serve these weights from the next token, or the next request, on.

        Args:
            proof: the weights, and what proves them.
            mode: what becomes of running requests.
            idle: awaited when its own requests ended or were cut: others may run here too, behind
                a router.

        Raises:
            RefusedError, UnreachableError, AsyncFlowError: it does not; it takes no requests until
                it was brought up again.
        """
        async with self.control:
            if self.health.label == self._labels.of(proof.held.version):
                return  # it was brought up to it meanwhile
            self._switching = True
            self._changed(self)
            try:
                # Where only log-probs prove, nothing may run before they did.
                unknown = proof.unknown(self.facts.args)
                keep = mode is SwitchMode.IN_FLIGHT and not unknown
                if mode is SwitchMode.DRAIN:
                    await self.requests.drained()
                elif not keep:
                    await self.requests.end()
                if not keep:
                    await idle()
                await self._replace(proof, keep_running=keep)
            except BaseException as error:
                self.health.doubted(f"its update failed: {error}", time.monotonic())
                self.requests.cut()
                self._nudge.set()
                raise
            finally:
                self._switching = False
                self.requests.last_token = time.monotonic()
                self._changed(self)

    async def _replace(self, proof: Proof, *, keep_running: bool) -> None:
        """Pause, load, prove, go on. What fails leaves it paused and doubted."""
        held, facts = proof.held, (self.facts.args, self.facts.input_tokens)
        label, limit = self._labels.of(held.version), self._options.update_timeout_s
        in_place = keep_running and self._options.in_flight == "in_place"
        start = time.perf_counter()
        self.health.doubted(f"it is given version {held.version}", time.monotonic())
        await self._post("/pause_generation", {"mode": "in_place" if in_place else "retract"})
        self.requests.switched()
        await self._pusher.push(held, label, flush=not in_place, ranks=self.facts.ranks)
        how = proof.by(self.facts.args)
        if how == "checksum":
            await proof.by_checksum(self.http, *facts, timeout_s=limit)
        if not self.paused or how == "logprobs":
            await self._continue()
        if how == "logprobs":
            await proof.by_logprobs(self.http, *facts, timeout_s=limit)
            if self.paused:
                await self._post("/pause_generation", {"mode": "in_place"})
        self.health.confirmed(label, time.monotonic())
        _log.info(
            "%s serves version %d (by %s, proven by %s) after %.2f s",
            self.name,
            held.version,
            self._options.update,
            how,
            time.perf_counter() - start,
        )

    async def _continue(self) -> None:
        await self._post("/continue_generation", {"torch_empty_cache": False})

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return await self.http.post(path, body, timeout_s=self._options.update_timeout_s)
