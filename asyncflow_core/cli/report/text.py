"""A report in 80 columns of plain text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from asyncflow_core.cli.report.record import Report, Sample, Spent
from asyncflow_core.cli.words import WIDTH, clock, count, printable, wrapped

__all__ = [
    "about",
    "bound_of",
    "lines",
    "over",
    "seconds",
    "shown_scores",
    "silence_of",
    "state_of",
    "total_of",
]

_BAR = 20
_SCORES = 8
_SAMPLE = 200
"""Characters of a prompt or a response that are shown."""


def lines(report: Report) -> Iterator[str]:
    """What is printed."""
    for line in _lines(report):
        yield printable(line)[:WIDTH]


def _lines(report: Report) -> Iterator[str]:
    yield from wrapped("", f"run {report.run}: {state_of(report)}")
    if report.silent_s:
        yield f"!! {silence_of(report)}"
    if report.error:
        yield from wrapped("!! ended by ", report.error.partition("\n")[0])
        if report.logs:
            yield from wrapped("   logs: ", f"{report.folder}/logs/ ({', '.join(report.logs)})")
    for warning in report.warnings:
        yield from wrapped("! ", warning)
    for note in report.notes:
        yield from wrapped("not read: ", note)
    for part in (_learning, _times, _staleness, _rows, _weights, _samples):
        found = list(part(report))
        if found:
            yield ""
            yield from found


def state_of(report: Report) -> str:
    """How far the run came, in words."""
    words = [report.state, report.preset] if report.preset else [report.state]
    words.append(f"{report.version} of {report.steps} steps")
    if report.life:
        words.append(f"resumed {report.life}x, the last life")
    if report.times.total_s:
        words[-1] += f" in {clock(report.times.total_s)}"
    return ", ".join(words)


def silence_of(report: Report) -> str:
    """What a run that should go on and is silent is said to be."""
    return f"last heard {clock(report.silent_s)} ago: the run's process is stopped or gone"


def _learning(report: Report) -> Iterator[str]:
    learning, reward = report.learning, report.learning.reward
    if reward is not None:
        line = f"{reward.first:.3f} in the first step, {reward.last:.3f} in the last"
        if reward.error is not None:
            line += (
                f"; mean of {reward.steps} steps {reward.begin:.3f} -> {reward.end:.3f} "
                f"(+- {reward.error:.3f}): it {reward.word}"
            )
        yield from wrapped("reward: ", line)
    if learning.scores:
        yield from wrapped("held-out score by version: ", shown_scores(report))
    for cause, rows in learning.causes.items():
        yield from wrapped(f"  {rows} rewards failed: ", cause)


def shown_scores(report: Report) -> str:
    """The first evaluation and the last ones."""
    scores = report.learning.scores
    if len(scores) > _SCORES:
        scores = [scores[0], *scores[-_SCORES + 1 :]]
    found = ", ".join(f"v{score.version} {score.score:.3f}" for score in scores)
    of = f", {scores[-1].rows} rows" if scores[-1].rows else ""
    return f"{found} (share with reward >= {report.learning.success:g}{of})"


def _times(report: Report) -> Iterator[str]:
    times = report.times
    if times.step.mean:
        yield from wrapped(
            "step: ",
            f"{seconds(times.step)}, {count(times.tokens_per_s)} tokens/s trained",
        )
    if times.parts:
        parts = ", ".join(f"{name} {share:.0%}" for name, share in times.parts.items() if share)
        yield from wrapped("the trainer: ", parts)
    if times.workers:
        yield f"busy ({over(report)})"
        for worker in times.workers:
            yield (
                f"  {worker.name:<18.18} {worker.busy:>5.0%}  {_bar(worker.busy):.<{_BAR}} "
                f"{worker.rows:>9} rows"
            )
    if times.bottleneck.words:
        yield from wrapped("bottleneck: ", times.bottleneck.words)
        for knob in times.bottleneck.knobs:
            yield f"  try {knob}"


def _bar(share: float) -> str:
    return "#" * round(_BAR * min(1.0, max(0.0, share)))


def over(report: Report) -> str:
    """Of which time the workers' shares are."""
    whole = "rollout and trainer" if report.state == "finished" else "trainer"
    return f"{whole} over all steps, the others in the last 10 s"


def seconds(spent: Spent) -> str:
    """Mean and largest, with the step of that."""
    return f"{_s(spent.mean)} on average, at most {_s(spent.largest)} (step {spent.at})"


def _s(duration_s: float) -> str:
    return f"{duration_s * 1000:.3g} ms" if duration_s < 1 else f"{duration_s:.2f} s"


def _staleness(report: Report) -> Iterator[str]:
    ages = report.staleness
    if not report.version:
        return
    updates = f", {ages.updates} updates" if ages.updates != ages.largest else ""
    yield (
        f"staleness of trained rows: mean {ages.mean:.2f}, max {ages.largest}{updates}, bound "
        f"{bound_of(report)}"
    )
    total = sum(ages.rows.values())
    for versions, rows in ages.rows.items():
        share = rows / total if total else 0.0
        yield f"  {versions:>4} {rows:>9} {share:>4.0%}  {_bar(share)}".rstrip()


def bound_of(report: Report) -> str:
    """The most versions there may be."""
    return "not known" if report.staleness.bound is None else f"{report.staleness.bound}"


def _rows(report: Report) -> Iterator[str]:
    tokens = report.tokens
    if tokens.generated:
        yield from wrapped(
            "tokens: ",
            f"{count(tokens.generated)} generated, {count(tokens.trained)} trained, "
            f"{count(tokens.evaluated)} evaluated, {count(tokens.kept)} kept over a switch",
        )
        share = sum(tokens.wasted.values()) / tokens.generated
        yield from wrapped(f"wasted ({share:.1%}): ", total_of(tokens.wasted))
    yield from wrapped("rows dropped: ", total_of(report.dropped))
    if report.masked:
        yield f"rows masked: {report.masked}"
    yield from wrapped("started again: ", total_of(report.restarts))


def total_of(counts: Mapping[str, int]) -> str:
    """Causes and their counts, most first."""
    found = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{cause} {count(number)}" for cause, number in found) or "none"


def _weights(report: Report) -> Iterator[str]:
    weights = report.weights
    if not weights.published:
        return
    yield from wrapped(
        "weights: ",
        f"{weights.published} versions of {weights.nbytes / 2**20:.2f} MiB, {weights.failures} "
        f"failures, {weights.compared} compared",
    )
    for name in ("publish", "stage", "commit"):
        yield f"  {name:<8} {seconds(getattr(weights, name))}"


def _samples(report: Report) -> Iterator[str]:
    samples = report.samples
    if samples.finish:
        yield from wrapped("responses of the last steps ended by: ", total_of(samples.finish))
    if not samples.complete and samples.chosen:
        yield f"of the last {samples.read} rows of samples.jsonl:"
    for why, sample in samples.chosen.items():
        yield from wrapped(f"{why}: ", about(sample))
        yield from wrapped("  prompt   ", _short(sample.prompt))
        yield from wrapped("  response ", _short(sample.response))


def about(sample: Sample) -> str:
    """A sample in figures."""
    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    where = "held out" if sample.batch is None else f"batch {sample.batch}"
    return (
        f"reward {reward}, {where}, {sample.tokens} tokens of version {sample.oldest}"
        + (f" to {sample.newest}" if sample.newest != sample.oldest else "")
        + f", ended by {sample.finish_reason}"
    )


def _short(text: str) -> str:
    more = f" ... ({len(text) - _SAMPLE} more characters)" if len(text) > _SAMPLE else ""
    return f'"{printable(text[:_SAMPLE])}"{more}'
