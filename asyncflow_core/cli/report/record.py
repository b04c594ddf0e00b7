"""The record of a report; `asyncflow report --json` prints it."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncflow_core.flow.running.status import Bottleneck, Tokens, WorkerStatus

__all__ = [
    "Ages",
    "Learning",
    "Report",
    "Sample",
    "Samples",
    "Score",
    "Spent",
    "Times",
    "Trend",
    "Weights",
]


@dataclass(frozen=True, slots=True)
class Sample:
    """A recorded row.

    Attributes:
        key: of the row. batch: it belongs to, None for a held-out one.
        prompt, response: texts; ids in brackets where the run has no tokenizer.
        reward: None where it is not a number. reward_error: why a reward failed, else empty.
        tokens: of the response. oldest, newest: version that made a token of it.
        finish_reason: why the response ended.
    """

    key: str
    batch: int | None
    prompt: str
    response: str
    reward: float | None
    reward_error: str
    tokens: int
    oldest: int
    newest: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Trend:
    """Where the steps' mean rewards began and ended.

    Attributes:
        first, last: of the first and the last step.
        steps: in each of the two means. begin, end: these means.
        error: standard error of their difference; None where a mean is of one step.
        word: "rose", "fell", "did not change for sure"; empty without an error.
    """

    first: float
    last: float
    steps: int
    begin: float
    end: float
    error: float | None
    word: str


@dataclass(frozen=True, slots=True)
class Score:
    """One evaluation: the share of held-out responses that were right, of so many rows."""

    version: int
    score: float
    rows: int


@dataclass(frozen=True, slots=True)
class Learning:
    """What the run learned.

    Attributes:
        reward: None before the first step.
        scores: oldest first. success: reward of a right response.
        errors: rewards that failed. causes: why, to rows, among the samples that were read.
    """

    reward: Trend | None = None
    scores: list[Score] = field(default_factory=list)
    success: float = 1.0
    errors: int = 0
    causes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of something that comes once a step: mean, largest, and the version of that."""

    mean: float = 0.0
    largest: float = 0.0
    at: int = 0


@dataclass(frozen=True, slots=True)
class Times:
    """Where time went.

    Attributes:
        total_s: of this life of the run, from start to end. train_s: of all recorded steps.
        step: of a step. parts: share of the steps' time by what the trainer did; together 1.
        tokens_per_s: trained, prompts included.
        workers: shares of the last 10 s; the trainer's, and how busy the rollout of a finished run
            was, over all steps.
        bottleneck: over the run; of a stage only where its shares tell of the training.
    """

    total_s: float = 0.0
    train_s: float = 0.0
    step: Spent = field(default_factory=Spent)
    parts: dict[str, float] = field(default_factory=dict)
    tokens_per_s: float = 0.0
    workers: list[WorkerStatus] = field(default_factory=list)
    bottleneck: Bottleneck = field(default_factory=Bottleneck)


@dataclass(frozen=True, slots=True)
class Ages:
    """Staleness of the trained rows.

    Attributes:
        bound: most versions there may be, None where it is not known. rows: versions to rows.
        mean, largest: in versions. updates: the largest in optimizer updates.
    """

    bound: int | None = None
    rows: dict[int, int] = field(default_factory=dict)
    mean: float = 0.0
    largest: int = 0
    updates: int = 0


@dataclass(frozen=True, slots=True)
class Weights:
    """Publishing weights.

    Attributes:
        published: versions. nbytes: of the last. publish, stage, commit: see `docs/metrics.md`.
        failures: stages and commits that were tried again. compared: bit for bit, without a
            difference.
    """

    published: int = 0
    nbytes: int = 0
    publish: Spent = field(default_factory=Spent)
    stage: Spent = field(default_factory=Spent)
    commit: Spent = field(default_factory=Spent)
    failures: int = 0
    compared: int = 0


@dataclass(frozen=True, slots=True)
class Samples:
    """Rows worth a look.

    Attributes:
        chosen: why it is shown ("best", "worst, last") to the row.
        read: rows that were read. complete: whether these are all there are.
        finish: finish reason to rows, of the training rows of the last steps.
    """

    chosen: dict[str, Sample] = field(default_factory=dict)
    read: int = 0
    complete: bool = True
    finish: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """A run.

    Attributes:
        run, preset: names. folder: of the run.
        state: as in `Status`; "unknown" without one. error: what ended it.
        silent_s: seconds since a run that should go on was last heard, else 0.
        version, steps: completed, and asked for. life: times it was resumed.
        learning, times, staleness, weights, samples: see there.
        tokens: response tokens. dropped: cause to rows. masked: rows counted without being trained.
        restarts: process to times; "all" where no more is known.
        warnings: what needs a look. notes: what could not be read. logs: names of files.
    """

    run: str
    folder: str
    state: str
    preset: str
    error: str
    silent_s: float
    version: int
    steps: int
    life: int
    learning: Learning
    times: Times
    staleness: Ages
    weights: Weights
    samples: Samples
    tokens: Tokens
    dropped: dict[str, int]
    masked: int
    restarts: dict[str, int]
    logs: list[str]
    notes: list[str]
    warnings: list[str] = field(default_factory=list)
