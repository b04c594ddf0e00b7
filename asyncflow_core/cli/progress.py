"""The progress line of a run: one line rewritten on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from pathlib import Path

from asyncflow_core import metrics
from asyncflow_core.cli.output import forget_output
from asyncflow_core.cli.runs import shown
from asyncflow_core.cli.words import clock
from asyncflow_core.config import RunConfig
from asyncflow_core.flow.running.results import StepResult, Summary

__all__ = ["Progress"]

_log = logging.getLogger(__name__)

_EVERY_S = 10.0
"""Seconds between lines where there is no terminal."""


class Progress:
    """Prints to standard output; times are [hours:]minutes:seconds."""

    def __init__(self, config: RunConfig, *, first: int | None = None) -> None:
        """Remember what the lines name; `first` is the step that a run is resumed from."""
        self._config = config
        self._resumed, self._first = first is not None, first or 0
        self._terminal = sys.stdout.isatty()
        self._start: float | None = None
        self._printed = 0.0
        self._reward: float | None = None
        self._silent = False

    def _print(self, text: str, end: str = "\n") -> None:
        """A reader that went away, as of a pipe, does not end the run."""
        if self._silent:
            return
        try:
            print(text, end=end, flush=True)
        except OSError as error:
            self._silent = True
            forget_output()  # whoever else prints here, a reward on a thread, goes on as well
            _log.warning("the progress cannot be shown any more (%s); the run goes on", error)

    def starting(self, moved_to: Path | None) -> None:
        """Say what is about to run, and where an earlier run of the name went."""
        if moved_to is not None:
            self._print(f"an earlier run of this name was moved to {shown(moved_to)}/")
        flow, config = self._config.workflow, self._config
        resumed = f", resumed from step {self._first}" if self._resumed else ""
        self._print(
            f"run {config.name}{resumed}: {flow.preset}, max staleness {flow.bound}, "
            f"{flow.steps} steps of {flow.groups_per_step} x {flow.group_size} samples, "
            f"rollout {config.rollout.plugin} x{config.rollout.replicas}, "
            f"trainer {config.trainer.plugin} x{config.trainer.world_size}; starting processes ..."
        )

    def step(self, step: StepResult) -> None:
        """Show one step."""
        now = time.monotonic()
        if self._start is None:
            self._start = now - step.metrics[metrics.STEP_WALL_S]
        reward = step.metrics[metrics.REWARD_MEAN]
        # One batch is noisy: the line shows a running mean over about ten steps.
        self._reward = reward if self._reward is None else 0.9 * self._reward + 0.1 * reward
        last = step.version == step.steps
        if not (self._terminal or last or now - self._printed >= _EVERY_S):
            return
        self._printed = now
        elapsed = now - self._start
        left = elapsed / (step.version - self._first) * (step.steps - step.version)
        line = (
            f"step {step.version:>{len(str(step.steps))}}/{step.steps}  reward {self._reward:.3f}  "
            f"{clock(elapsed)} elapsed, {clock(left)} left  "
            f"staleness {step.metrics[metrics.STALENESS_MEAN]:.2f} "
            f"(max {self._config.workflow.bound})  "
            f"{step.metrics[metrics.TOKENS_PER_S] / 1000:.1f}k tok/s"
        )
        if self._terminal:  # a line that wraps is not overwritten by the next one
            line = f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}"
        self._print(line, end="" if self._terminal else "\n")

    def close(self) -> None:
        """End the line on a terminal."""
        if self._terminal and self._start is not None:
            self._print("")

    def finished(self, summary: Summary, folder: Path) -> None:
        """Say where things are, and last what was learned."""
        self._print(
            f"{summary.rows_trained} rows trained in {summary.wall_s:.0f} s "
            f"(whole run {summary.total_s:.0f} s), staleness mean "
            f"{summary.mean_staleness_trained:.2f}, max {summary.max_staleness_trained} of "
            f"{summary.max_staleness_allowed}, busy: rollout {summary.busy_rollout:.0%}, trainer "
            f"{summary.busy_trainer:.0%}"
        )
        if summary.reward_errors:
            rows = summary.rows_trained + summary.rows_masked + summary.rows_evaluated
            self._print(
                f"{summary.reward_errors} of {rows} rewards failed and count 0; see reward_error "
                f"in samples.jsonl"
            )
        model = ", model/" if (folder / "model").exists() else ""
        self._print(
            f"files: {shown(folder)}/ (summary.json, metrics.jsonl, samples.jsonl, logs/{model})"
        )
        if summary.eval_before is not None and summary.eval_after is not None:
            evaluation = self._config.evaluation
            least = evaluation.success if evaluation else 1.0
            what = "exact match" if least == 1.0 else f"share with reward >= {least:g}"
            self._print(
                f"held-out {what}: {summary.eval_before:.3f} before, {summary.eval_after:.3f} after"
            )
        elif self._config.evaluation is not None:
            why = "was rewarded before and after" if summary.rows_evaluated else "is there"
            self._print(f"held-out score: none, no held-out prompt {why}")
