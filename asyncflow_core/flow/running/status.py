"""What a run looks like from outside: `status.json`, and which part holds the others up. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from asyncflow_core.errors import DataError
from asyncflow_core.services.data_store import StoreStats

__all__ = [
    "STATUS_FILE",
    "Bottleneck",
    "Counters",
    "Shares",
    "Staleness",
    "Status",
    "Tokens",
    "WorkerStatus",
    "bottleneck",
]

STATUS_FILE = "status.json"

_BUSY = 0.85
"""A worker that works this share of its time has next to nothing to spare."""
_WAITS = 0.1
"""A trainer that waits for rows for a smaller share is not worth a word."""
_LAST_VERSIONS = 12


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker of a task.

    Attributes:
        name: as in the logs. task: what it works on.
        busy: share of the last seconds it worked. wait: share it waited for rows.
        rows: finished since it started.
        version: of the weights a replica serves, None elsewhere.
        running, waiting: sequences of a replica that are decoded, and not yet started.
        silent_s: seconds since it answered last, when that is long ago; else 0.
    """

    name: str
    task: str
    busy: float = 0.0
    wait: float = 0.0
    rows: int = 0
    version: int | None = None
    running: int = 0
    waiting: int = 0
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Response tokens since the start.

    Attributes:
        generated: by all replicas, the lost ones included.
        trained: in completed steps. evaluated: of held-out rows.
        kept: lived through a switch of weights in the middle of their response.
        wasted: cause to tokens that were generated for nothing.
    """

    generated: int = 0
    trained: int = 0
    evaluated: int = 0
    kept: int = 0
    wasted: dict[str, int] = field(default_factory=dict)

    @property
    def elsewhere(self) -> int:
        """Neither trained nor evaluated nor wasted: in rows on their way; 0 when a run is over."""
        return self.generated - self.trained - self.evaluated - sum(self.wasted.values())


@dataclass(slots=True)
class Staleness:
    """Trained rows by staleness: over the run, and of the last versions.

    Attributes:
        bound: most there may be.
        rows: staleness to rows.
        last: (version that was made, staleness to rows), oldest first.
    """

    bound: int = 0
    rows: dict[int, int] = field(default_factory=dict)
    last: list[tuple[int, dict[int, int]]] = field(default_factory=list)

    def add(self, version: int, rows: Mapping[int, int]) -> None:
        """Count a completed step; copies made before it stay as they are."""
        self.rows = self.rows | {age: self.rows.get(age, 0) + rows[age] for age in sorted(rows)}
        self.last = [*self.last, (version, dict(sorted(rows.items())))][-_LAST_VERSIONS:]


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What holds the run up.

    Attributes:
        what: "trainer", "rollout", the name of a stage, "between" (the trainer's steps), "store",
            "bound"; empty when nothing does.
        words: a sentence with the figures.
        knobs: settings that would help, most promising first.
    """

    what: str = ""
    words: str = ""
    knobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Status:
    """A run at one moment; `status.json` holds it.

    Attributes:
        run: its name. preset: of its workflow.
        state: "starting", "running", "finished", "failed" or "interrupted".
        pid, host: of its own process.
        time: seconds since 1970 when this was written. elapsed_s: since the start.
        every_s: how often it is written while the run goes on.
        version, steps: completed, and of the whole run.
        step_wall_s: of the last step. tokens_per_s: trained in it, prompts included.
        reward: mean of the last step.
        scores: (version, share of held-out responses that were right).
        workers, store, staleness, tokens, bottleneck: see there.
        waits: who waits for whom, a line each.
        error: what ended it, in state "failed".
    """

    run: str
    preset: str
    state: str
    pid: int
    host: str
    time: float
    elapsed_s: float
    every_s: float
    version: int
    steps: int
    step_wall_s: float = 0.0
    tokens_per_s: float = 0.0
    reward: float | None = None
    scores: list[tuple[int, float]] = field(default_factory=list)
    workers: list[WorkerStatus] = field(default_factory=list)
    store: StoreStats = field(default_factory=StoreStats)
    staleness: Staleness = field(default_factory=Staleness)
    tokens: Tokens = field(default_factory=Tokens)
    waits: list[str] = field(default_factory=list)
    bottleneck: Bottleneck = field(default_factory=Bottleneck)
    error: str = ""

    def to_json(self) -> bytes:
        """For the file."""
        return _STATUS.dump_json(self)

    @classmethod
    def from_json(cls, text: bytes) -> Status:
        """Inverse of `to_json`.

        Raises:
            DataError: it is not one, or one of another release.
        """
        try:
            return _STATUS.validate_json(text)
        except ValidationError as error:
            raise DataError(
                f"this is not the status of a run as this release writes it: "
                f"{error.errors()[0]['msg']} at {error.errors()[0]['loc']}"
            ) from error


_STATUS = TypeAdapter(Status)


class Shares:
    """From counters of seconds to shares of the last seconds, by worker.

    A worker that was started again counts from 0; what it counted before is then left out.
    """

    def __init__(self, window_s: float = 10.0) -> None:
        """Look back over `window_s` seconds, or as far as there is."""
        self._window_s = window_s
        self._seen: dict[str, deque[tuple[float, float, float]]] = {}

    def add(self, name: str, now: float, busy_s: float, wait_s: float) -> tuple[float, float]:
        """Take a worker's counters at `now`; shares busy and waiting since the window's begin."""
        seen = self._seen.setdefault(name, deque())
        if seen and (busy_s < seen[-1][1] or wait_s < seen[-1][2]):
            seen.clear()
        seen.append((now, busy_s, wait_s))
        while len(seen) > 2 and now - seen[1][0] >= self._window_s:
            seen.popleft()
        then, busy_then, wait_then = seen[0]
        if now <= then:
            return 0.0, 0.0
        return (
            min(1.0, (busy_s - busy_then) / (now - then)),
            min(1.0, (wait_s - wait_then) / (now - then)),
        )


class Counters:
    """The sum of one counter over workers that come, go, and begin again from 0."""

    def __init__(self, before: int = 0) -> None:
        """Go on from what was counted before."""
        self._now: dict[str, int] = {}
        self._before = before

    def set(self, name: str, value: int) -> None:
        """A worker says where its counter stands."""
        last = self._now.get(name, 0)
        if value < last:
            self._before += last
        self._now[name] = value

    def left(self, name: str) -> None:
        """A worker is gone; if it comes back it begins from 0."""
        self._before += self._now.pop(name, 0)

    @property
    def total(self) -> int:
        """Of all, what those counted included that are gone."""
        return self._before + sum(self._now.values())


def bottleneck(
    workers: Sequence[WorkerStatus], store: StoreStats, *, bound: int, preset: str
) -> Bottleneck:
    """The part that holds the others up, by what each of them did in the last seconds.

    A trainer that is always busy is the bottleneck. One that waits for rows waits for the busiest
    task before it; when none of those is busy either, they wait for the bound, or for the longest
    responses of a batch.
    """
    trainer = next((w for w in workers if w.task == "train"), None)
    if trainer is None:
        return Bottleneck()
    if store.waiting_puts:
        return Bottleneck(
            "store",
            f"prompts wait for room in the data store ({store.reserved_bytes >> 20} of "
            f"{store.capacity_bytes >> 20} MiB reserved)",
            ("data_store.options.capacity_bytes", "rollout.sampling.max_new_tokens"),
        )
    before = _busy_by_task(workers)
    busiest = max(before, key=lambda task: before[task], default="")
    if trainer.busy >= _BUSY or (trainer.wait < _WAITS and trainer.busy >= 0.5):
        spare = before.get("rollout", 1.0)
        idle = f"; rollout is busy {spare:.0%}" if spare < _BUSY else ""
        return Bottleneck(
            "trainer",
            f"trainer busy {trainer.busy:.0%}: the trainer is the bottleneck{idle}",
            ("trainer.world_size: more ranks", "trainer.micro_batch_tokens: larger"),
        )
    between = 1.0 - trainer.busy - trainer.wait
    if between >= 0.3 and between > trainer.wait:
        return Bottleneck(
            "between",
            f"trainer busy {trainer.busy:.0%}, waits for rows {trainer.wait:.0%}; the rest goes "
            f"into what is between: publishing weights, acknowledging rows, the controller",
            ("workflow.groups_per_step: larger steps", "weight_sync.plugin: a faster one"),
        )
    if trainer.wait < _WAITS:
        return Bottleneck()
    waits = f"trainer waits for rows {trainer.wait:.0%} of the time"
    if busiest and before[busiest] >= _BUSY:
        share = f"{before[busiest]:.0%}"
        if busiest == "rollout":
            knobs: tuple[str, ...] = ("rollout.replicas: more", "rollout.rows_in_flight: more")
            if bound == 0 or preset == "sequential":
                knobs = ("workflow.max_staleness: 1 or more, preset async", *knobs)
            words = f"{waits}, rollout is busy {share}: rollout is the bottleneck"
            return Bottleneck("rollout", words, knobs)
        words = f"{waits}, stage {busiest} is busy {share}: it is the bottleneck"
        knobs = (f"stages.{busiest}.workers: more", f"stages.{busiest}.rows: another size")
        return Bottleneck(busiest, words, knobs)
    most = f", {busiest} is busy only {before[busiest]:.0%}" if busiest else ""
    return Bottleneck(
        "bound",
        f"{waits}{most}: batches wait for their longest responses, or prompts for max_staleness "
        f"{bound}",
        (
            f"workflow.max_staleness: {bound + 1}",
            "rollout.sampling.max_new_tokens: smaller",
            "rollout.rows_in_flight: more",
        ),
    )


def _busy_by_task(workers: Sequence[WorkerStatus]) -> dict[str, float]:
    """Mean over the workers of each task that lies before the trainer's."""
    shares: dict[str, list[float]] = {}
    for worker in workers:
        if worker.task not in ("train", "record"):
            shares.setdefault(worker.task, []).append(worker.busy)
    return {task: sum(found) / len(found) for task, found in shares.items()}
