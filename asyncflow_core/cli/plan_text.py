"""What `asyncflow plan` prints for people. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from asyncflow_core.flow.simulation.profiles import Profile
from asyncflow_core.flow.simulation.search import Candidate, Found
from asyncflow_core.flow.simulation.times import StageTimes, Times
from asyncflow_core.flow.simulation.workload import Workload

__all__ = ["Assumed", "report"]

_ROWS = 12
_WIDTH = 79
_APART = 0.1
"""Share by which a profile may differ from its simulation without a word."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """What figures rest on that was not measured, and what they leave out; a line each."""

    said: tuple[str, ...]
    left_out: tuple[str, ...]


def report(
    work: Workload,
    found: Found,
    times: Times,
    assumed: Assumed,
    checks: Sequence[tuple[Profile, float | None]],
    *,
    budget: int,
    best: Sequence[str],
) -> Iterator[str]:
    """The lines."""
    for profile, step_s in checks:
        yield from _wrapped(_check(profile, step_s))
    yield from _times(times)
    for line in assumed.said:
        yield from _wrapped(f"assumed: {line}")
    if assumed.left_out:
        yield from _wrapped(f"not simulated: {'; '.join(assumed.left_out)}")
    yield ""
    yield from _table(work, found)
    yield ""
    pruned = found.allocations - len(found.candidates)
    yield from _wrapped(
        f"{found.allocations} allocations of up to {budget} devices: {len(found.candidates)} "
        f"simulated, {max(0, pruned)} that cannot be faster, or lie between two that were, not"
    )
    yield from _best(found)
    yield f"  {' '.join(best)}"


def _check(profile: Profile, step_s: float | None) -> str:
    head = f"profile {profile.name}: {profile.steps} steps of {profile.step_s:.3f} s"
    if step_s is None:
        return f"{head}; its own configuration cannot be planned here, so it is not checked"
    share = step_s / profile.step_s
    apart = abs(share - 1) > _APART
    advice = ": do not trust the rest much, it was no steady run or not as it is now"
    return f"{head}, simulated {step_s:.3f} s ({share:.2f} of it){advice if apart else ''}"


def _times(times: Times) -> Iterator[str]:
    lengths, rollout, trainer = times.lengths, times.rollout, times.trainer
    all_lengths = list(chain.from_iterable(lengths.groups))
    mean = sum(all_lengths) / len(all_lengths) if all_lengths else lengths.mean or 0.0
    longest = max(all_lengths, default=lengths.longest)
    at_most = "" if longest is None else f", at most {longest}"
    yield from _wrapped(
        f"response: {mean:.0f} tokens{at_most}; of a token {_ms(rollout.token_s)}"
        f" + {_ms(rollout.token_row_s)} a sequence, of a response {_ms(rollout.row_s)}"
    )
    for name, stage in times.stages.items():
        yield f"stage {name}: {_stage(stage)}"
    yield from _wrapped(
        f"trainer: {trainer.token_s * 1e6:.1f} us a token and rank ({trainer.ranks} of them, "
        f"scaling {trainer.scaling:.2f}), {_ms(trainer.update_s)} an update, "
        f"{_ms(trainer.step_s)} a step"
    )
    weights = times.weights
    yield (
        f"weights: export {_ms(weights.export_s)}, stage {_ms(weights.stage_s)}, commit "
        f"{_ms(weights.commit_s)}"
    )


def _stage(times: StageTimes) -> str:
    parts = ((times.call_s, "call"), (times.row_s, "row"), (times.token_s, "token"))
    return " + ".join(f"{_ms(seconds)} a {what}" for seconds, what in parts if seconds) or "no time"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _table(work: Workload, found: Found) -> Iterator[str]:
    named = [name for name in work.config.stages if _differs(found, name)]
    of_stages = "".join(f"{name[:9]:>10}" for name in named)
    yield (
        f"{'replicas':>8}{'ranks':>6}{of_stages}{'devices':>8}{'step s':>8}{'tokens/s':>9}"
        f"{'rollout':>8}{'train':>6}{'stale':>6}{'/bound':>7}  held up by"
    )
    shown = list(found.candidates[:_ROWS])
    for extra in (found.best, found.present):
        if extra is not None and extra not in shown:
            shown.append(extra)
    for candidate in shown:
        at, done = candidate.allocation, candidate.simulated
        workers = "".join(f"{at.workers[name]:>10}" for name in named)
        marks = [mark for mark, one in _marks(found) if one is candidate]
        yield (
            f"{at.replicas:>8}{at.ranks:>6}{workers}{candidate.devices:>8}{done.step_s:>8.3f}"
            f"{_count(done.tokens_per_s):>9}{done.busy['rollout']:>8.0%}{done.busy['train']:>6.0%}"
            f"{done.staleness_mean:>6.2f}{done.step_s / candidate.bound_s:>7.2f}  "
            f"{done.bottleneck.what or '-'}{' <- ' + ', '.join(marks) if marks else ''}"
        )
    if len(found.candidates) > len(shown):
        yield f"and {len(found.candidates) - len(shown)} slower ones"


def _marks(found: Found) -> list[tuple[str, Candidate | None]]:
    return [("best", found.best), ("now", found.present)]


def _differs(found: Found, stage: str) -> bool:
    return len({c.allocation.workers[stage] for c in found.candidates}) > 1


def _best(found: Found) -> Iterator[str]:
    best, now = found.best, found.present
    line = f"best: {best.simulated.step_s:.3f} s a step with {best.devices} devices"
    if now is not None and now is not best:
        line += f", {now.simulated.step_s / best.simulated.step_s:.2f} times as fast as now"
    yield from _wrapped(line)
    if best.simulated.bottleneck.words:
        yield from _wrapped(f"  then: {best.simulated.bottleneck.words}")


def _wrapped(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, subsequent_indent="  ")


def _count(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{number:.0f}"
