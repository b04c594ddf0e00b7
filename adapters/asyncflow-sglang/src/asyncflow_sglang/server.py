"""One server: its process, health, requests and weights.

Concurrency: everything that changes the server's weights or pauses it holds `control`.
Longer than most modules: its parts are one state, which no two of them could share.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from asyncflow_core.errors import AsyncFlowError, EngineError
from asyncflow_core.services.rollout import SwitchMode
from asyncflow_sglang.engine import Engine, Facts
from asyncflow_sglang.health import Health, State
from asyncflow_sglang.http import Http, RefusedError, UnreachableError
from asyncflow_sglang.launch import ServerProcess, free_port, port_is_free
from asyncflow_sglang.options import SGLangOptions
from asyncflow_sglang.proof import Proof
from asyncflow_sglang.replies import Labels, Segment
from asyncflow_sglang.running import Requests
from asyncflow_sglang.trajectory import Trajectory

__all__ = ["Server"]

_log = logging.getLogger(__name__)
_CLOSE_S = 5.0
"""Longest time a paused server is asked to go on when the rollout closes."""
_TRIES = 3
"""Attempts to bring a server up, after which it counts as lost; and takings over by another run,
after which it is left to that one."""


class Server:
    """A server this rollout attached to or started.

    Args:
        name: in errors and logs.
        http: its address.
        options: of the rollout.
        labels: names of versions.
        vocab: size of the vocabulary.
        process: makes its process, which is to listen on a port; None for one that runs already.
        requests: those it serves.
        wanted: the weights it should serve; the model's own at first.
        changed: called when it may take requests, or may no longer.

    Attributes:
        fatal: why it cannot be used; while it was never used, nothing will change that.
        waits: it could be used, but carries weights that are not the model's; a commit cures it.
        switching: a commit is at it, or about to begin.
    """

    def __init__(
        self,
        name: str,
        http: Http,
        *,
        options: SGLangOptions,
        labels: Labels,
        vocab: int,
        process: Callable[[int], ServerProcess] | None,
        requests: Requests,
        wanted: Callable[[], Proof],
        changed: Callable[[Server], None],
    ) -> None:
        self.name = name
        self.http = http
        self.health = Health(time.monotonic())
        self.fatal: AsyncFlowError | None = None
        self.waits = False
        self.control = asyncio.Lock()
        self.requests = requests
        self.paused = self.switching = False
        self._options = options
        self._labels = labels
        self._make_process = process
        self._process: ServerProcess | None = None
        self._port = 0
        self._starts = 0
        self._given_up = False
        self._wanted = wanted
        self._changed = changed
        self._engine = Engine(name, http, options=options, labels=labels, vocab=vocab)
        self._greeted = False
        self._failures = self._takings = 0
        self._nudge = asyncio.Event()
        self._lost = asyncio.Event()

    # Life.

    async def start(self) -> None:
        """Start its process, where it is ours."""
        self.http.open()
        await self._start_process()

    async def _start_process(self) -> None:
        if self._make_process is not None:
            self._starts += 1
            self._port = free_port()
            self.http.url = f"http://127.0.0.1:{self._port}"
            self._process = self._make_process(self._port)
            await self._process.start()

    async def aclose(self) -> None:
        """Cut its requests; end it, where it is ours."""
        self.requests.cut()
        try:
            if self._process is None and self.usable and self._engine.stands:
                with contextlib.suppress(RefusedError, UnreachableError, TimeoutError):
                    async with asyncio.timeout(_CLOSE_S):
                        await self._engine.go_on()
            await self.http.aclose()
            await self._engine.aclose()
        finally:
            if self._process is not None:
                await self._process.stop()

    @property
    def ready(self) -> bool:
        """Whether it may take requests: it holds, proven, what should serve, and stands not."""
        return self._current and not self.switching and not self.paused

    @property
    def known(self) -> bool:
        """Whether it is ready, or usable but for the weights it carries."""
        return self.ready or self.waits

    @property
    def usable(self) -> bool:
        """Whether it can be given weights now, while requests run on it."""
        return self.health.state is State.READY

    def holds(self, version: int) -> bool:
        """Whether it holds that version, proven; paused or not."""
        return self.usable and self.health.label == self._labels.of(version)

    @property
    def facts(self) -> Facts | None:
        """What it said of itself; None before it was first heard."""
        return self._engine.facts if self._greeted else None

    def foreign(self, spans: list[tuple[str, int]]) -> None:
        """It, or another behind the router, served weights that are not of this rollout."""
        if self._options.router is not None:
            _log.warning("%s, or another behind the router, made tokens of %s", self.name, spans)
            self._nudge.set()  # each tells by its own name whether it was that one
            return
        if self.usable:  # else it was seen before
            self._takings += not all(self._restarted(label) for label, _ in spans)
        self._doubt(f"it made tokens with the weights {spans}")

    def _restarted(self, label: str) -> bool:
        """Whether it can have got weights of that name from nobody but us, or by itself."""
        return label in ("default", self._labels.started) or self._labels.mine(label)

    def _doubt(self, reason: str) -> None:
        """Nobody knows what it holds, nor what made its last tokens."""
        _log.warning("%s: %s", self.name, reason)
        self.health.doubted(reason, time.monotonic())
        self.requests.doubt()
        self.reconsider()

    def expect_switch(self) -> None:
        """A commit is about to `switch` it: it takes no more requests before."""
        self.switching = True
        self.reconsider()

    def reconsider(self) -> None:
        """Its state changed, or what it should serve."""
        self._changed(self)
        self._nudge.set()

    @property
    def gone(self) -> bool:
        """Whether nothing will bring it back."""
        spent = self._process is not None and self._starts > self._options.restarts
        return self._given_up or (spent and self.health.state is State.LOST)

    @property
    def line(self) -> str:
        """Its state, in words."""
        since = time.monotonic() - self.health.now
        words = f"{self.name} ({self.http.url}) is {self.health.state} since {since:.0f} s"
        return words + (f": {self.health.reason}" if self.health.reason else "")

    # Watching.

    async def watch(self) -> None:
        """Look at it until cancelled; bring it up, to the current weights, and up again."""
        while not self.gone:
            await self._turn()
            self._nudge.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.poll_s):
                    await self._nudge.wait()

    def give_up(self, error: BaseException) -> None:
        """Nobody watches it any more: whoever waits for it is told why."""
        _log.error("%s: its watch failed", self.name, exc_info=error)
        self._given_up = True
        self.fatal = EngineError(f"{self.name}: its watch failed: {error!r}", service=self.name)
        self.health.lost(str(self.fatal), time.monotonic())
        self._changed(self)
        self._lost.set()
        self.requests.cut()

    async def _turn(self) -> None:
        before = self.health.state
        await self._look()
        if self.usable and not self._current and not self.switching:
            self.health.doubted("other weights should serve", time.monotonic())
        if self.health.state is State.STALE and not self.control.locked():
            await self._bring_up()
        # Last, since a server that cannot be brought up counts as lost, too.
        if self.health.state is State.LOST and before is not State.LOST:
            await self._lose()

    async def _look(self) -> None:
        if self._process is not None and (ended := self._process.ended):
            self.health.lost(ended, time.monotonic())
            return
        switching = self.switching  # then or now: the answer may tell of what was before
        try:
            label = await self._engine.label(timeout_s=self._options.poll_timeout_s)
            if not switching and not self.switching:
                self._answered(label)
        except UnreachableError as error:
            self.health.missed(str(error), time.monotonic(), refused=error.refused)
        except (RefusedError, EngineError) as error:
            self._refused(error)
        self._check_deadlines()
        self._changed(self)

    def _answered(self, label: str) -> None:
        before, held = self.health.state, self.health.label
        self.health.answered(label, time.monotonic())
        if before is State.READY and self.health.state is State.STALE:
            restarted = self._restarted(label)
            self._takings += not restarted
            self._doubt(
                f"it serves weights {label!r}, not {held!r}: "
                + ("it was restarted" if restarted else "somebody else gave it weights")
            )

    def _refused(self, error: RefusedError | EngineError) -> None:
        """It answers, but not as SGLang does."""
        self.health.missed(str(error), time.monotonic(), refused=False)
        if self._make_process is None and not self._greeted:
            self.fatal = self._engine.hopeless(error)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        age, limit = now - self.health.now, self._options.start_timeout_s
        if self.health.state is State.STARTING and self._process is not None and age > limit:
            lines = self._process.last_lines()
            self.health.lost(f"it did not answer within {limit:g} s; {lines}", now)
        quiet, requests = now - self.requests.last_token, len(self.requests)
        # A drain waits for these, so they count while it switches, too.
        if requests and self.usable and not self.paused and quiet > self._options.stall_s:
            words = f"it has {requests} requests and gave no token for {quiet:.0f} s"
            self.health.lost(words, now)

    async def _lose(self) -> None:
        """Give its requests back and start it again, where it is ours."""
        _log.warning("%s", self.line)
        self._changed(self)
        self._lost.set()
        self.requests.cut()
        self._engine.forget()
        if self._process is None:
            return
        ended = self._process.ended
        await self._process.stop()
        if not self._greeted and ended and port_is_free(self._port):
            self._given_up = True  # what ended it at once would do so again
        if self.gone:
            _log.error("%s ended for the %d. time and is given up", self.name, self._starts)
            return
        self.health.restarted(time.monotonic())
        await self._start_process()

    # Weights.

    async def _bring_up(self) -> None:
        """Let it hold, proven, what should serve, which may change meanwhile."""
        async with self.control:
            try:
                if self._takings >= _TRIES:
                    raise EngineError(
                        f"another run gives it weights too, {self._takings} times by now; one "
                        f"server serves one run",
                        service=self.name,
                    )
                while not self._current:
                    await self._engine.greet()
                    self._greeted = True
                    await self._bring_to(self._wanted())
                self.fatal, self.waits, self._failures = None, False, 0
            except (RefusedError, UnreachableError, AsyncFlowError, OSError) as error:
                self._not_up(error)
        self._changed(self)

    @property
    def _current(self) -> bool:
        return self.holds(self._wanted().held.version)

    def _not_up(self, error: Exception) -> None:
        now = time.monotonic()
        reason = f"it cannot be brought up: {error}"
        level = logging.DEBUG if reason == self.health.reason else logging.WARNING
        _log.log(level, "%s: %s", self.name, reason)
        self.health.doubted(reason, now)
        if self.waits:
            return
        self.fatal = error if isinstance(error, AsyncFlowError) else None
        self._failures += 1
        if self._process is not None and self._failures >= _TRIES:
            self._failures = 0
            self.health.lost(reason, now)

    async def _bring_to(self, proof: Proof) -> None:
        """Give it these weights, or find that it came with them."""
        label = await self._engine.label()
        ours = self._process is not None
        came = (self._labels.started if ours else "default", self._labels.of(0))
        if not proof.held.borrowed or (self._labels.mine(label) and label not in came):
            await self._replace(proof, keep_running=False)
        elif label in came:
            await self._adopt(proof)
        else:
            self.waits = True
            raise EngineError(
                f"{self.name} serves weights {label!r}, of another run; it waits for the first "
                f"commit of this one",
                service=self.name,
            )

    async def _adopt(self, proof: Proof) -> None:
        """Take the weights it came with for version 0, if they are the model's."""
        try:
            how = await self._engine.prove(proof)
        except EngineError:
            self.waits = self._process is None
            raise
        label = self._labels.of(proof.held.version)
        await self._engine.rename(label)
        await self._settle()
        self.health.confirmed(label, time.monotonic())
        _log.info("%s serves the model's own weights (proven by %s)", self.name, how)

    async def _replace(self, proof: Proof, *, keep_running: bool) -> None:
        """Pause, load, prove, go on. What fails leaves it paused and doubted."""
        version = proof.held.version
        in_place = keep_running and self._options.in_flight == "in_place"
        start = time.perf_counter()
        self.health.doubted(f"it is given version {version}", time.monotonic())
        await self._engine.hold("in_place" if in_place else "retract")
        self.requests.switched()
        await self._engine.load(proof, flush=not in_place)
        try:
            how = await self._engine.prove(proof)
        except (AsyncFlowError, RefusedError):
            if not self._engine.stands:  # log-probs made it go on
                await self._engine.hold("retract")
            raise
        label = self._labels.of(version)
        await self._engine.rename(label)
        await self._settle()
        self.health.confirmed(label, time.monotonic())
        _log.info(
            "%s serves version %d (by %s, proven by %s) after %.2f s",
            self.name,
            version,
            self._options.update,
            how,
            time.perf_counter() - start,
        )

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
        try:
            await self._unless_lost(self._switch(proof, mode, idle))
        except BaseException as error:
            self.health.doubted(f"its update failed: {error}", time.monotonic())
            self.requests.cut()
            raise
        finally:
            self.switching = False
            self.requests.last_token = time.monotonic()
            self.reconsider()

    async def _switch(
        self, proof: Proof, mode: SwitchMode, idle: Callable[[], Awaitable[None]]
    ) -> None:
        if mode is SwitchMode.DRAIN:  # not under control, so that a pause can end meanwhile
            await self.requests.drained()
            await idle()
        async with self.control:
            if self._current:
                return  # it was brought up to it meanwhile
            if not self.usable:
                raise UnreachableError(self.line)
            # Where only log-probs prove, nothing may run before they did.
            unknown = proof.unknown(self._engine.facts.args)
            keep = mode is SwitchMode.IN_FLIGHT and not unknown
            if not keep and mode is not SwitchMode.DRAIN:
                await self.requests.end()
                await idle()
            await self._replace(proof, keep_running=keep)

    async def _unless_lost(self, call: Coroutine[Any, Any, None]) -> None:
        """Await it; `UnreachableError` as soon as the server is lost."""
        self._lost.clear()
        task, lost = asyncio.ensure_future(call), asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            raise UnreachableError(self.line)
        task.result()

    # Requests and pauses.

    async def serve(self, trajectory: Trajectory) -> Segment:
        """Go on with a request here; see `Requests.serve`."""
        seeds = bool(self._engine.facts.args.get("enable_deterministic_inference"))
        segment = await self.requests.serve(trajectory, self.health.label or "", seeds=seeds)
        if segment.finish is None:
            self._nudge.set()
        return segment

    async def pause(self) -> None:
        """Stand still at the next token, everything kept.

        What cannot be paused has its requests taken away, and is brought up again.
        """
        self.paused = True
        self._changed(self)
        if self.usable or len(self.requests):
            async with self.control:
                await self._stand_or_go()
                await self.requests.settled()

    async def resume(self) -> None:
        """Go on."""
        self.paused = False
        if self.usable or len(self.requests):
            async with self.control:
                await self._stand_or_go()
        self.requests.last_token = time.monotonic()
        self._changed(self)

    async def _stand_or_go(self) -> None:
        if not self.usable:
            return
        try:
            await self._unless_lost(self._settle())
        except (RefusedError, UnreachableError) as error:
            what = "paused" if self.paused else "resumed"
            self.health.doubted(f"it cannot be {what}: {error}", time.monotonic())
            _log.warning("%s", self.line)
            self.requests.cut()
            self.reconsider()

    async def _settle(self) -> None:
        """Let it stand or go as the last `pause` or `resume` wants."""
        while self._engine.stands != self.paused:
            await (self._engine.hold("in_place") if self.paused else self._engine.go_on())
