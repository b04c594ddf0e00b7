"""`Flow`, the user's object: from a file or from Python to steps and a trained model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncflow_core.config import (
    ModelConfig,
    RolloutConfig,
    RunConfig,
    StageConfig,
    TrainerConfig,
    WeightSyncConfig,
)
from asyncflow_core.config_source import ConfigSource
from asyncflow_core.errors import ConfigError, ServiceClosedError
from asyncflow_core.flow.planning.plan import Plan, make_plan
from asyncflow_core.flow.processes.supervision import EndedError
from asyncflow_core.flow.processes.watchdog import Restarts
from asyncflow_core.flow.running.checkpoint import Checkpoints
from asyncflow_core.flow.running.controller import Controller
from asyncflow_core.flow.running.folder import RunFolder
from asyncflow_core.flow.running.results import StepResult, Summary
from asyncflow_core.flow.running.resume import resumable
from asyncflow_core.registry import Registry

__all__ = ["Flow", "Use", "reward", "stage", "use"]


_log = logging.getLogger(__name__)

_LOOK_S = 0.2
_NOT_STARTED = "the flow has not been started; call run() or stream()"


@dataclass(frozen=True, slots=True)
class Use:
    """A plugin by name with what is said about it; made by `use`, `stage` and `reward`."""

    plugin: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def section(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """As a configuration section: known fields of the section, everything else an option."""
        known = {key: value for key, value in self.values.items() if key in fields}
        options = {key: value for key, value in self.values.items() if key not in fields}
        if options:
            known["options"] = {**known.get("options", {}), **options}
        return {"plugin": self.plugin, **known} if self.plugin else known


def use(plugin: str, **values: Any) -> Use:
    """Choose a plugin: `use("hzp", lr=5e-4, world_size=2)`.

    Args:
        plugin: its name.
        values: fields of the section (replicas, world_size, sampling, devices, ...) and options of
            the plugin, side by side.
    """
    return Use(plugin, values)


def stage(
    function: str | Callable[..., Any],
    *,
    reads: Sequence[str],
    writes: Sequence[str],
    whole_groups: bool = False,
    partitions: Sequence[str] = (),
    workers: int = 1,
    rows: int = 64,
) -> Use:
    """A stage from a function `f(batch) -> {column: values}`.

    A function runs on worker threads of this process; by `module:name` it runs in processes.
    """
    return Use(
        "",
        {
            "function": function,
            "kind": "columns",
            "reads": tuple(reads),
            "writes": tuple(writes),
            "whole_groups": whole_groups,
            "partitions": tuple(partitions),
            "workers": workers,
            "rows": rows,
        },
    )


def reward(function: str | Callable[..., Any], *, workers: int = 1, rows: int = 64) -> Use:
    """A reward from a function of one row, as `f(response, answer) -> float`.

    Its parameters are `prompt` and `response` (texts) or names of columns.
    """
    return Use("", {"function": function, "kind": "reward", "workers": workers, "rows": rows})


class Flow:
    """A run that is checked and can be started, once.

    Raises:
        ConfigError: on construction, with every fault that was found; nothing was started.
    """

    def __init__(
        self,
        *,
        registry: Registry | None = None,
        resume: str | Path | None = None,
        **sections: Any,
    ) -> None:
        """Build from sections, as in a configuration file; a plugin is chosen with `use`.

        Args:
            registry: plugins to use; default: the installed ones.
            resume: folder of a run (runs/NAME) to go on with, which these sections began.
            sections: fields of `RunConfig`; a section is a `Use` or a mapping.
        """
        self._start(ConfigSource.from_values(_tree(sections)), registry, resume)

    @classmethod
    def from_config(
        cls,
        path: str | Path,
        overrides: Mapping[str, Any] | None = None,
        *,
        registry: Registry | None = None,
        resume: str | Path | None = None,
    ) -> Flow:
        """Read a YAML file.

        Args:
            path: of the file.
            overrides: dotted path to value, as `{"workflow.max_staleness": 1}`.
            registry: plugins to use; default: the installed ones.
            resume: folder of a run (runs/NAME) to go on with, which this file began.
        """
        source = ConfigSource.from_file(path)
        for key, value in (overrides or {}).items():
            source.override(key, value)
        flow = cls.__new__(cls)
        flow._start(source, registry, resume)
        return flow

    @classmethod
    def resume(
        cls,
        run: str | Path,
        overrides: Mapping[str, Any] | None = None,
        *,
        registry: Registry | None = None,
    ) -> Flow:
        """Go on with a run that ended, from its newest checkpoint, by its own configuration.

        Args:
            run: its folder, runs/NAME.
            overrides: dotted path to value; rows, prompts and weights must keep their meaning
                (`docs/guides/resume.md`).
            registry: plugins to use; default: the installed ones.

        Raises:
            ConfigError: there is nothing to go on with, or the configuration has faults.
        """
        folder = Path(run)
        resumable(folder)
        return cls.from_config(folder / "config.yaml", overrides, registry=registry, resume=folder)

    def _start(
        self, source: ConfigSource, registry: Registry | None, resume: str | Path | None
    ) -> None:
        self._resume = resume is not None
        self.resumed_from: int | None = None
        """The step that a resumed run goes on from."""
        if resume is not None:
            folder = Path(resume).resolve()
            self.resumed_from = resumable(folder)
            source.override("name", folder.name)
            source.override("out", str(folder.parent))
        self._plan = make_plan(source, registry or Registry())
        self._summary: Summary | None = None
        self._folder: RunFolder | None = None
        self._moved_to: Path | None = None
        self._started = False

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return self._plan.config

    @property
    def plan(self) -> Plan:
        """What was checked: plugins, options, tasks."""
        return self._plan

    @property
    def started(self) -> bool:
        """Whether its folder was made and processes may have been started."""
        return self._folder is not None

    @property
    def folder(self) -> Path:
        """`runs/<name>`, once started."""
        if self._folder is None:
            raise ServiceClosedError(_NOT_STARTED)
        return self._folder.path

    @property
    def moved_to(self) -> Path | None:
        """Where what an earlier run of this name left was moved to; None if there was nothing.

        Raises:
            ServiceClosedError: the flow has not been started.
        """
        if self._folder is None:
            raise ServiceClosedError(_NOT_STARTED)
        return self._moved_to

    @property
    def summary(self) -> Summary:
        """The finished run."""
        if self._summary is None:
            raise ServiceClosedError("the flow has no summary before its last step is done")
        return self._summary

    async def stream(
        self, *, on_start: Callable[[], None] | None = None
    ) -> AsyncIterator[StepResult]:
        """Run on the caller's event loop; yields each step. Leaving the loop early ends the run.

        Args:
            on_start: called once the run has its folder, before anything is started.
        """
        results: asyncio.Queue[StepResult | None] = asyncio.Queue()
        running = asyncio.create_task(self._run(results.put_nowait, on_start))
        running.add_done_callback(lambda _: results.put_nowait(None))
        try:
            while (result := await results.get()) is not None:
                yield result
            await running
        finally:
            running.cancel()
            await asyncio.wait({running})

    def run(self, *, on_start: Callable[[], None] | None = None) -> Iterator[StepResult]:
        """Run on a thread of its own; yields each step. Leaving the loop early ends the run.

        Args:
            on_start: called on that thread, once the run has its folder, before anything is
                started.
        """
        results: queue.SimpleQueue[StepResult | None] = queue.SimpleQueue()
        thread = _RunThread(self._run(results.put, on_start), lambda: results.put(None))
        thread.start()
        try:
            while (result := _take(results)) is not None:
                yield result
            thread.join()
        finally:
            thread.end()
        if thread.failure is not None:
            raise thread.failure

    async def _run(
        self, on_step: Callable[[StepResult], None], on_start: Callable[[], None] | None
    ) -> None:
        if self._started:
            raise ServiceClosedError("a flow runs once; make another one to run again")
        self._started = True
        resume, watchdog = self._resume, self._plan.config.watchdog
        restarts = Restarts(watchdog.restarts, watchdog.restart_window_s)
        while True:
            self._folder = await asyncio.to_thread(RunFolder, self._plan.config, resume=resume)
            self._moved_to = self._moved_to or self._folder.moved_to
            try:
                if on_start is not None:
                    on_start()
                on_start = None
            except BaseException:
                self._folder.close()
                raise
            try:
                self._summary = await Controller(self._plan, self._folder, on_step).run()
            except EndedError as error:
                if not self._goes_on(error):
                    raise
                step = resumable(self._folder.path)
                if refusal := restarts.refusal("trainer", time.monotonic(), finished=step):
                    if not restarts.limit:
                        raise
                    raise EndedError(
                        f"the run was resumed {refusal} (watchdog.restarts), the last time from "
                        f"step {step}, and its trainer died once more: {error}",
                        service=error.service,
                        trains=True,
                    ) from error
                _log.warning("%s\nthe run goes on from its checkpoint of step %d", error, step)
                resume = True
            else:
                return

    def _goes_on(self, error: EndedError) -> bool:
        """Whether the run is resumed by itself after this."""
        return (
            self._plan.config.watchdog.on_trainer_death == "resume"
            and error.trains
            and self._folder is not None
            and bool(Checkpoints(self._folder.path).versions())
        )


def _take(results: queue.SimpleQueue[StepResult | None]) -> StepResult | None:
    while True:
        try:
            # Python acts on a signal that came just before an endless wait only after the wait.
            return results.get(timeout=_LOOK_S)
        except queue.Empty:
            continue


class _RunThread(threading.Thread):
    """A coroutine on an event loop of its own, so that the caller may block between steps."""

    def __init__(self, main: Coroutine[Any, Any, None], done: Callable[[], None]) -> None:
        super().__init__(name="asyncflow", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(main)
        self._done = done
        self.failure: BaseException | None = None

    def run(self) -> None:
        """The thread's body."""
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(asyncio.wait_for(self._task, None))
        except asyncio.CancelledError:
            pass
        except BaseException as failure:  # noqa: BLE001 - raised again by the caller's thread
            self.failure = failure
        finally:
            self._done()

    def end(self) -> None:
        """Cancel what runs and wait until everything it started is gone."""
        with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended by itself
            self._loop.call_soon_threadsafe(self._task.cancel)
        self.join()


_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "rollout": RolloutConfig.model_fields,
    "trainer": TrainerConfig.model_fields,
    "weight_sync": WeightSyncConfig.model_fields,
}
_NAMED: Mapping[str, Mapping[str, Any]] = {
    "models": ModelConfig.model_fields,
    "stages": StageConfig.model_fields,
}


def _tree(sections: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in sections.items():
        if name in _NAMED:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name} is a mapping of name to section, got {value!r}")
            tree[name] = {key: _section(made, _NAMED[name]) for key, made in value.items()}
        else:
            tree[name] = _section(value, _FIELDS.get(name, {"options": None}))
    return tree


def _section(value: Any, fields: Mapping[str, Any]) -> Any:
    return value.section(fields) if isinstance(value, Use) else value
