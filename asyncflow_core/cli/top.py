"""`asyncflow top`: what a run does now, in 80 columns of plain text, refreshed."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncflow_core.cli.runs import find_run, how_to_go_on
from asyncflow_core.cli.words import LIVE, WIDTH, clock, count, silence_s, wrapped
from asyncflow_core.errors import DataError
from asyncflow_core.flow.running.status import STATUS_FILE, Status, WorkerStatus

__all__ = ["picture", "top"]

_BAR = 20
_WAITS = 8


def top(run: str, *, once: bool, as_json: bool) -> int:
    """Show a run until it ends or Ctrl-C; returns the exit status, 1 if it failed or was killed.

    Args:
        run: its folder, or its name below `runs/`.
        once: print once. Without a terminal that is what happens anyway.
        as_json: print `status.json`, with the summary of a finished run beside it, and whether its
            process is gone without a word.
    """
    folder = find_run(run, file=STATUS_FILE)
    if as_json:
        status, summary = _read(folder)
        gone = _gone(status, time.time())
        print(json.dumps({**json.loads(status.to_json()), "summary": summary, "gone": gone}))
        return int(gone or status.state == "failed")
    refreshing = sys.stdout.isatty() and not once
    while True:
        status, summary = _read(folder)
        gone = _gone(status, time.time())
        lines = list(picture(status, summary, now=time.time(), gone=gone))
        lines += how_to_go_on(folder) if gone else ()
        if refreshing:  # home, each line cleared to its end, then whatever was below
            fits = lines[: shutil.get_terminal_size().lines - 1]
            sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in fits) + "\x1b[J")
            sys.stdout.flush()
        else:
            print("\n".join(lines))
        if gone or not refreshing or status.state not in LIVE:
            return int(gone or status.state == "failed")
        time.sleep(status.every_s)


def _read(folder: Path) -> tuple[Status, dict[str, Any] | None]:
    path, summary = folder / STATUS_FILE, folder / "summary.json"
    try:
        status = Status.from_json(path.read_bytes())
    except DataError as error:
        raise DataError(
            f"{str(path)!r} cannot be shown: {error}; a run that goes on writes it anew within "
            f"seconds, what one that ended did is in its other files"
        ) from error
    if status.state == "finished" and summary.is_file():
        try:
            found: dict[str, Any] = json.loads(summary.read_bytes())
        except ValueError as error:
            raise DataError(
                f"{str(summary)!r} cannot be shown: it is no JSON ({error}); without the file the "
                f"rest is shown"
            ) from error
        return status, found
    return status, None


def _gone(status: Status, now: float) -> bool:
    """Whether a run ended without a word, as by SIGKILL; only its own machine can tell."""
    if not silence_s(status, now) or status.host != socket.gethostname():
        return False
    return not Path(f"/proc/{status.pid}").exists()


def picture(
    status: Status, summary: Mapping[str, Any] | None, *, now: float, gone: bool = False
) -> Iterator[str]:
    """The lines that are shown.

    Args:
        status: of the run.
        summary: of a finished one.
        now: seconds since 1970.
        gone: whether its process is gone without a word.
    """
    for line in _lines(status, summary, now, gone):
        yield line[:WIDTH]


def _lines(
    status: Status, summary: Mapping[str, Any] | None, now: float, gone: bool
) -> Iterator[str]:
    yield (
        f"run {status.run}: {status.state}, {status.preset}, step {status.version}/{status.steps}"
        f", {clock(status.elapsed_s)}, process {status.pid} on {status.host}"
    )
    if age_s := silence_s(status, now):
        what = "gone, it was killed" if gone else "stopped or gone"
        yield f"!! last heard {clock(age_s)} ago: the run's process is {what}"
    if status.error:
        yield from wrapped("!! ended by ", status.error.partition("\n")[0])
        yield "   its logs stand in the run's folder, in logs/"
    reward = "" if status.reward is None else f"reward {status.reward:.3f}, "
    yield (
        f"last step: {reward}{status.step_wall_s:.2f} s, {count(status.tokens_per_s)} tokens/s "
        f"trained"
    )
    if status.scores:
        shown = ", ".join(f"v{version} {score:.3f}" for version, score in status.scores[-4:])
        yield f"held-out score by version: {shown}"
    if status.bottleneck.words:
        yield from wrapped("bottleneck: ", status.bottleneck.words)
        for knob in status.bottleneck.knobs:
            yield f"  try {knob}"
    yield ""
    yield from _workers(status)
    yield from _queues(status)
    yield from _staleness(status)
    yield from _tokens(status)
    if status.waits:
        yield ""
        yield "who waits for whom"
        for line in status.waits[:_WAITS]:
            yield from wrapped("  ", line)
        if len(status.waits) > _WAITS:
            yield f"  and {len(status.waits) - _WAITS} more"
    if summary is not None:
        yield ""
        yield (
            f"summary: {summary['rows_trained']} rows trained in {summary['wall_s']:.0f} s, "
            f"staleness mean {summary['mean_staleness_trained']:.2f}, max "
            f"{summary['max_staleness_trained']} of {summary['max_staleness_allowed']}"
        )


def _workers(status: Status) -> Iterator[str]:
    yield f"{'worker':<18} {'busy':>5} {'waits':>5}  {'':{_BAR}} {'rows':>9}"
    for worker in status.workers:
        bar = "#" * round(worker.busy * _BAR)
        yield (
            f"{worker.name:<18.18} {worker.busy:>5.0%} {worker.wait:>5.0%}  {bar:.<{_BAR}} "
            f"{worker.rows:>9}{_more(worker)}"
        )


def _more(worker: WorkerStatus) -> str:
    if worker.silent_s:
        return f" SILENT {worker.silent_s:.0f}s"
    return "" if worker.version is None else f" v{worker.version} {worker.running} run"


def _queues(status: Status) -> Iterator[str]:
    store = status.store
    if not store.tasks:
        return
    yield ""
    yield f"{'queue':<18} {'ready':>7} {'leased':>7} {'done':>9}  held by"
    for name, task in store.tasks.items():
        holders = ", ".join(f"{holder} {rows}" for holder, rows in task.holders.items())
        expired = f" ({task.expired} leases ran out)" if task.expired else ""
        yield (
            f"{name:<18.18} {task.ready:>7} {task.leased:>7} {task.committed:>9}  "
            f"{holders or '-'}{expired}"
        )
    line = f"store: {store.rows} rows, {store.bytes / 2**20:.1f} MiB"
    if store.capacity_bytes:
        line += f", {store.reserved_bytes / store.capacity_bytes:.0%} of its credit taken"
    if store.waiting_puts:
        line += f", {store.waiting_puts} producers wait for room"
    yield line
    if store.rows_dropped:
        dropped = ", ".join(f"{reason} {rows}" for reason, rows in store.rows_dropped.items())
        yield from wrapped("rows dropped: ", dropped)


def _staleness(status: Status) -> Iterator[str]:
    staleness = status.staleness
    total = sum(staleness.rows.values())
    if not total:
        return
    yield ""
    yield f"staleness of trained rows, in versions (bound {staleness.bound})"
    for versions in range(staleness.bound + 1):
        rows = staleness.rows.get(versions, 0)
        yield f"{versions:>4} {rows:>9} {rows / total:>4.0%}  {'#' * round(_BAR * rows / total)}"
    shown = []
    for version, counts in staleness.last[-6:]:
        rows = sum(counts.values())
        mean = sum(n * found for n, found in counts.items()) / max(1, rows)
        shown.append(f"v{version} {mean:.2f}/{max(counts, default=0)}")
    yield f"mean/max by version: {', '.join(shown)}"


def _tokens(status: Status) -> Iterator[str]:
    tokens = status.tokens
    if not tokens.generated:
        return
    yield ""
    yield (
        f"tokens: {count(tokens.generated)} generated, {count(tokens.trained)} trained"
        f", {count(tokens.evaluated)} evaluated, {count(tokens.kept)} kept over a switch"
    )
    if tokens.wasted:
        wasted = ", ".join(f"{cause} {count(number)}" for cause, number in tokens.wasted.items())
        share = sum(tokens.wasted.values()) / tokens.generated
        yield from wrapped(f"wasted ({share:.1%}): ", wasted)
