"""A report as one HTML file, which asks the network for nothing and runs no script. Pure."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncflow_core import __version__, metrics
from asyncflow_core.cli.report.charts import Curve, bars, curves, stack
from asyncflow_core.cli.report.reading import RunFiles
from asyncflow_core.cli.report.record import Report, Sample
from asyncflow_core.cli.report.text import (
    about,
    bound_of,
    over,
    seconds,
    shown_scores,
    silence_of,
    state_of,
    total_of,
)
from asyncflow_core.cli.report.times import column
from asyncflow_core.cli.words import count, printable
from asyncflow_core.config_source import dump_yaml

__all__ = ["MARK", "page"]

MARK = "<!doctype html><!-- asyncflow report -->"
"""How each of these files begins."""

_SHOWN = 4000
"""Characters of a prompt or a response that are shown."""
_SECRET = re.compile(r"(^|_)(token|secret|password|passwd|credentials?|api_?key|auth)$", re.I)
_ELSEWHERE = frozenset({metrics.TRAINER_WAIT_S, metrics.TRAINER_BUSY_S, metrics.TRAINER_TOKENS})
"""Of the trainer's metrics, those that stand in another chart."""

_STYLE = """
:root{color-scheme:light dark;--ink:#1c1c1c;--faint:#6b6b6b;--line:#ddd;--paper:#fff;
--c0:#0b62c4;--c1:#c4560b;--c2:#2b8a3e;--c3:#8a3ea8}
@media(prefers-color-scheme:dark){:root{--ink:#e8e8e8;--faint:#9a9a9a;--line:#3a3a3a;
--paper:#161616;--c0:#6aa9f4;--c1:#f09a58;--c2:#6cc37c;--c3:#c890e0}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:2rem auto;
max-width:64rem;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem;
border-bottom:1px solid var(--line)}
.faint{color:var(--faint)}.bad{border-left:4px solid var(--c1);padding-left:.6rem;
white-space:pre-wrap;overflow-wrap:anywhere}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(24rem,100%),1fr));gap:1rem}
figure{margin:0}figcaption{font-weight:600}.legend span{margin-right:1rem;font-size:.85rem}
.key{display:inline-block;width:.8em;height:.8em;margin-right:.3em}svg{width:100%;height:auto}
svg text{font-size:10px;fill:var(--faint)}.grid{stroke:var(--line);fill:none}
.bound{stroke:var(--ink);stroke-dasharray:4 3;fill:none}.hover{fill:transparent}
.hover:hover{fill:var(--faint);fill-opacity:.2}.line{fill:none;stroke:var(--c);stroke-width:1.6}
.area{fill:var(--c)}.band{fill:var(--c);fill-opacity:.15}.key{background:var(--c)}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}
table{border-collapse:collapse;margin:0 0 .8rem}td,th{text-align:left;padding:.15rem 1rem .15rem 0;
vertical-align:top}th{font-weight:500;color:var(--faint);white-space:nowrap}
td.n{text-align:right;font-variant-numeric:tabular-nums}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:color-mix(in srgb,var(--ink) 6%,
transparent);padding:.5rem;margin:.2rem 0 .8rem;max-height:24rem;overflow:auto}
.bar{display:inline-block;height:.7em;background:var(--c0)}
"""


def page(report: Report, files: RunFiles) -> str:
    """The whole file; may hold lone surrogates, to be written with `backslashreplace`."""
    sections = (
        _section("Learning", _learning(report, files)),
        _section("Loss and gradients", _loss(files)),
        _section("Where time went", _times(report, files)),
        _section("Staleness", _staleness(report, files)),
        _section("Tokens and rows", _rows(report)),
        _section("Weights", _weights(report)),
        _section("Samples", _samples(report)),
        _section("Configuration", _config(files)),
    )
    return "".join(
        (
            f'{MARK}\n<html lang="en"><head><meta charset="utf-8">\n',
            # Nothing is loaded and nothing runs, whatever a text of the run might contain.
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n",
            '<meta name="viewport" content="width=device-width">\n',
            f"<title>{_text(report.run)}</title><style>{_STYLE}</style></head><body>\n",
            f"<h1>{_text(report.run)}</h1><p>{_text(state_of(report))}<br>",
            f'<span class="faint">{_text(report.folder)}, asyncflow {__version__}</span></p>\n',
            *_first(report),
            *sections,
            "</body></html>\n",
        )
    )


def _section(title: str, parts: Iterator[str]) -> str:
    inner = "".join(parts)
    return f"<h2>{title}</h2>\n{inner}\n" if inner else ""


def _first(report: Report) -> Iterator[str]:
    if report.silent_s:
        yield f'<p class="bad">{_text(silence_of(report))}</p>\n'
    if report.error:
        yield f'<p class="bad">ended by {_text(report.error)}</p>\n'
        yield f"<p>Logs in its folder: {_text(', '.join(report.logs) or 'none')}</p>\n"
    for warning in report.warnings:
        yield f'<p class="bad">{_text(warning)}</p>\n'
    for note in report.notes:
        yield f'<p class="bad">not read: {_text(note)}</p>\n'


def _learning(report: Report, files: RunFiles) -> Iterator[str]:
    learning, rows = report.learning, []
    if (reward := learning.reward) is not None:
        rows.append(("reward", f"{reward.first:.3f} in the first step, {reward.last:.3f} last"))
        if reward.error is not None:
            rows.append(
                (
                    f"mean of {reward.steps} steps",
                    f"{reward.begin:.3f} -> {reward.end:.3f} "
                    f"(+- {reward.error:.3f}): it {reward.word}",
                )
            )
    if learning.scores:
        rows.append(("held-out score", shown_scores(report)))
    rows += [(f"{rows_} rewards failed", cause) for cause, rows_ in learning.causes.items()]
    yield _table(rows)
    steps = files.steps
    spread = column(steps, metrics.REWARD_STD)
    scores = {score.version: score.score for score in learning.scores}
    yield _charts(
        curves(
            "Reward: mean and standard deviation of each step",
            [Curve("reward", column(steps, metrics.REWARD_MEAN), spread)],
        ),
        curves("Held-out score by version", [Curve("score", scores, dots=True)], zero=True),
        curves(
            "Tokens of a response",
            [Curve("tokens", column(steps, metrics.RESPONSE_TOKENS_MEAN))],
            zero=True,
        ),
    )


def _loss(files: RunFiles) -> Iterator[str]:
    names = dict.fromkeys(name for step in files.steps.values() for name in step)
    chosen = [n for n in names if n.startswith(("trainer/", "loss/")) and n not in _ELSEWHERE]
    yield _charts(*(curves(name, [Curve(name, column(files.steps, name))]) for name in chosen))


def _times(report: Report, files: RunFiles) -> Iterator[str]:
    times, steps = report.times, files.steps
    rows = []
    if times.step.mean:
        rows.append(("a step", seconds(times.step)))
        rows.append(("trained", f"{count(times.tokens_per_s)} tokens/s, prompts included"))
    if times.bottleneck.words:
        rows.append(("bottleneck", times.bottleneck.words))
        rows += [("try", knob) for knob in times.bottleneck.knobs]
    yield _table(rows)
    if times.workers:
        yield f'<p class="faint">Busy: {_text(over(report))}.</p><table>'
        for worker in times.workers:
            width_rem = 8 * min(1.0, max(0.0, worker.busy))
            yield (
                f'<tr><th>{_text(worker.name)}</th><td class="n">{worker.busy:.0%}</td>'
                f'<td><span class="bar" style="width:{width_rem:.2f}rem"></span></td>'
                f'<td class="n">{worker.rows} rows</td></tr>'
            )
        yield "</table>\n"
    trains, waits = column(steps, metrics.TRAINER_BUSY_S), column(steps, metrics.TRAINER_WAIT_S)
    saves, wall = column(steps, metrics.CHECKPOINT_SAVE_S), column(steps, metrics.STEP_WALL_S)
    parts = (trains, waits, saves)
    rest = {v: whole - sum(part.get(v, 0.0) for part in parts) for v, whole in wall.items()}
    layers = {"trains": trains, "waits for rows": waits, "between": rest}
    if any(saves.values()):
        layers["saves a checkpoint"] = saves
    yield _charts(
        stack("Seconds of a step by what the trainer does", layers),
        curves(
            "Trained tokens per second, prompts included",
            [Curve("tokens/s", column(steps, metrics.TOKENS_PER_S))],
            zero=True,
        ),
        curves(
            "Seconds of the weights' way",
            [
                Curve("publish", column(steps, metrics.WEIGHTS_PUBLISH_S)),
                Curve("stage", column(steps, metrics.WEIGHTS_STAGE_S)),
                Curve("commit", column(steps, metrics.WEIGHTS_COMMIT_S)),
            ],
            zero=True,
        ),
    )


def _staleness(report: Report, files: RunFiles) -> Iterator[str]:
    ages, steps = report.staleness, files.steps
    if not steps:
        return
    yield _table(
        [
            ("mean", f"{ages.mean:.2f} versions"),
            ("largest", f"{ages.largest} versions, {ages.updates} updates"),
            ("bound", bound_of(report)),
        ]
    )
    yield _charts(
        curves(
            "Staleness by step, and its bound",
            [
                Curve("mean", column(steps, metrics.STALENESS_MEAN)),
                Curve("max", column(steps, metrics.STALENESS_MAX), merge=max),
            ],
            line=None if ages.bound is None else float(ages.bound),
            zero=True,
        ),
        bars("Trained rows by staleness", ages.rows),
    )


def _rows(report: Report) -> Iterator[str]:
    tokens = report.tokens
    share = sum(tokens.wasted.values()) / tokens.generated if tokens.generated else 0.0
    yield _table(
        [
            ("tokens generated", f"{tokens.generated}"),
            ("trained", f"{tokens.trained}"),
            ("evaluated", f"{tokens.evaluated}"),
            ("kept over a switch", f"{tokens.kept}"),
            (f"wasted ({share:.1%})", total_of(tokens.wasted)),
            ("rows dropped", total_of(report.dropped)),
            ("rows masked", f"{report.masked}"),
            ("started again", total_of(report.restarts)),
        ]
    )


def _weights(report: Report) -> Iterator[str]:
    weights = report.weights
    if weights.published:
        yield _table(
            [
                ("published", f"{weights.published} versions of {weights.nbytes} bytes"),
                ("publish", seconds(weights.publish)),
                ("stage", seconds(weights.stage)),
                ("commit", seconds(weights.commit)),
                ("failures", f"{weights.failures}"),
                ("compared bit for bit", f"{weights.compared}"),
            ]
        )


def _samples(report: Report) -> Iterator[str]:
    samples = report.samples
    if samples.finish:
        yield f"<p>Responses of the last steps ended by: {_text(total_of(samples.finish))}.</p>\n"
    if samples.chosen and not samples.complete:
        yield f"<p>Of the last {samples.read} rows of samples.jsonl.</p>\n"
    for why, sample in samples.chosen.items():
        yield f"<p><b>{_text(why)}</b>: {_text(about(sample))}</p>\n{_sample(sample)}"


def _sample(sample: Sample) -> str:
    texts = {"prompt": sample.prompt, "response": sample.response, "error": sample.reward_error}
    return "".join(
        f'<span class="faint">{name}</span><pre>{_text(_short(text), keep=_LINES)}</pre>\n'
        for name, text in texts.items()
        if text or name != "error"
    )


def _short(text: str) -> str:
    more = f"\n... ({len(text) - _SHOWN} more characters)" if len(text) > _SHOWN else ""
    return text[:_SHOWN] + more


def _config(files: RunFiles) -> Iterator[str]:
    if files.config is not None:
        values = _open(files.config.model_dump(mode="json"))
        text = _text(dump_yaml(values), keep=_LINES)
        yield f"<details><summary>as it was resolved</summary><pre>{text}</pre></details>\n"


def _open(value: Any) -> Any:
    """Without what looks like a secret: a report is made to be passed on."""
    if isinstance(value, Mapping):
        return {
            key: "(not shown)" if found and _SECRET.search(str(key)) else _open(found)
            for key, found in value.items()
        }
    return [_open(found) for found in value] if isinstance(value, list) else value


def _charts(*charts: str) -> str:
    inner = "".join(charts)
    return f'<div class="charts">\n{inner}</div>\n' if inner else ""


def _table(rows: Sequence[tuple[str, str]]) -> str:
    inner = "".join(f"<tr><th>{_text(k)}</th><td>{_text(v)}</td></tr>" for k, v in rows)
    return f"<table>{inner}</table>\n" if inner else ""


_LINES = "\n\t"


def _text(text: str, *, keep: str = "\n") -> str:
    return html.escape(printable(text, keep))
