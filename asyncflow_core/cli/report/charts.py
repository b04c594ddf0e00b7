"""Curves as inline SVG, without scripts: a pointer over a step shows its figures. Pure."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Curve", "bars", "curves", "stack", "ticks"]

_WIDTH, _HEIGHT = 480, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 8, 8, 20
_BARS = 12
"""So many each have their number below."""
_POINTS = 160
"""Most places along an axis; of a longer run each stands for several steps."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Version to value.

    Attributes:
        name: in the legend.
        values: of the curve.
        spread: how far the band around it reaches, by version; empty for none.
        merge: of several steps that share a place.
        dots: a mark at each value, for values that are few.
    """

    name: str
    values: Mapping[int, float]
    spread: Mapping[int, float] | None = None
    merge: Callable[[Sequence[float]], float] = statistics.fmean
    dots: bool = False


def curves(
    title: str, found: Sequence[Curve], *, line: float | None = None, zero: bool = False
) -> str:
    """A chart of curves over the versions; empty without a value.

    Args:
        title: above it.
        found: the curves.
        line: a level that is marked, as a bound.
        zero: whether 0 is in the picture at any rate.
    """
    thinned = [_thinned(curve, _places(found)) for curve in found]
    thinned = [curve for curve in thinned if curve.values]
    if not thinned:
        return ""
    edges = [edge for curve in thinned for edge in _edges(curve)]
    edges += [0.0] if zero else []
    edges += [line] if line is not None else []
    frame = _Frame.around(edges, [version for curve in thinned for version in curve.values])
    parts = [frame.axes()]
    for number, curve in enumerate(thinned):
        parts.append(_band(frame, curve, number))
        parts.append(_drawn(frame, curve, number))
    if line is not None:
        y = frame.y(line)
        parts.append(f'<path class="bound" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
    parts.append(_hover(frame, {curve.name: curve.values for curve in thinned}))
    return _figure(title, [curve.name for curve in thinned], "".join(parts))


def stack(title: str, layers: Mapping[str, Mapping[int, float]]) -> str:
    """Layers on top of each other, over the versions; a missing value counts 0."""
    versions = sorted({version for layer in layers.values() for version in layer})
    if not versions:
        return ""
    full = [
        Curve(name, {v: max(0.0, layer.get(v, 0.0)) for v in versions})
        for name, layer in layers.items()
    ]
    thinned = [_thinned(curve, _places(full)) for curve in full]
    places = list(thinned[0].values)
    tops = {v: sum(curve.values[v] for curve in thinned) for v in places}
    frame = _Frame.around([0.0, *tops.values()], places)
    below = dict.fromkeys(places, 0.0)
    parts = [frame.axes()]
    for number, curve in enumerate(thinned):
        above = {v: below[v] + curve.values[v] for v in places}
        parts.append(f'<path class="area c{number}" d="{_between(frame, below, above)}"/>')
        below = above
    shown = {curve.name: curve.values for curve in thinned}
    parts.append(_hover(frame, {**shown, "together": tops}))
    return _figure(title, list(layers), "".join(parts))


def bars(title: str, counts: Mapping[int, int]) -> str:
    """A bar for each number; empty without a count."""
    total = sum(counts.values())
    if not total:
        return ""
    frame = _Frame.around([0.0, *counts.values()], [min(counts) - 1, max(counts) + 1])
    width = 0.8 * (frame.x(1) - frame.x(0))
    few = max(counts) - min(counts) < _BARS
    parts = [frame.axes(range(min(counts), max(counts) + 1) if few else None)]
    for number, count in counts.items():
        left, top = frame.x(number) - width / 2, frame.y(count)
        parts.append(
            f'<rect class="area c0" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{frame.y(0) - top:.1f}">'
            f"<title>{number}: {count} rows, {count / total:.1%}</title></rect>"
        )
    return _figure(title, [], "".join(parts))


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two, a step of 1, 2 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((factor * power for factor in (1, 2, 5) if factor * power >= raw), 10 * power)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class _Frame:
    """From versions and values to places in the picture."""

    low: float
    high: float
    first: int
    last: int

    @classmethod
    def around(cls, values: Sequence[float], versions: Sequence[int]) -> _Frame:
        low, high = min(values), max(values)
        scale = max(abs(low), abs(high))  # what differs by rounding alone is one height
        room = max(0.05 * (high - low), 1e-6 * scale) if high > low else 0.1 * scale
        room = room or 1.0
        # Nothing below 0 is hinted at where nothing is.
        return cls(low if low == 0 else low - room, high + room, min(versions), max(versions))

    def x(self, version: float) -> float:
        width = _WIDTH - _LEFT - _RIGHT
        if self.last == self.first:
            return _LEFT + width / 2
        return _LEFT + width * (version - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        height = _HEIGHT - _TOP - _BOTTOM
        return _TOP + height * (self.high - value) / (self.high - self.low)

    def axes(self, versions: Sequence[int] | None = None) -> str:
        parts = []
        for value in ticks(self.low, self.high):
            y = self.y(value)
            parts.append(
                f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
                f'<text x="{_LEFT - 4}" y="{y + 3:.1f}" text-anchor="end">{_short(value)}</text>'
            )
        if versions is None:
            found = [tick for tick in ticks(self.first, self.last, 6) if tick == int(tick)]
            versions = [int(tick) for tick in found]
        parts += [
            f'<text x="{self.x(version):.1f}" y="{_HEIGHT - 5}" text-anchor="middle">'
            f"{version}</text>"
            for version in versions
        ]
        return "".join(parts)


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / (1e3 if unit == 'k' else size):g}{unit}"
    return f"{value:.4g}"


def _places(found: Sequence[Curve]) -> int:
    """Steps that share a place."""
    versions = [version for curve in found for version in curve.values]
    return max(1, math.ceil((max(versions) - min(versions) + 1) / _POINTS)) if versions else 1


def _thinned(curve: Curve, share: int) -> Curve:
    """Each place has the values of `share` steps, and the first step's number."""

    def thin(values: Mapping[int, float]) -> dict[int, float]:
        merged: dict[int, list[float]] = {}
        for version in sorted(values):
            merged.setdefault(version - version % share, []).append(values[version])
        return {version: curve.merge(some) for version, some in merged.items()}

    spread = None if curve.spread is None else thin(curve.spread)
    return Curve(curve.name, thin(curve.values), spread, curve.merge, curve.dots)


def _edges(curve: Curve) -> list[float]:
    spread = curve.spread or {}
    values = curve.values.items()
    return [value + sign * spread.get(v, 0.0) for v, value in values for sign in (-1, 1)]


def _band(frame: _Frame, curve: Curve, number: int) -> str:
    if curve.spread is None:
        return ""
    spread = curve.spread
    low = {v: value - spread.get(v, 0.0) for v, value in curve.values.items()}
    high = {v: value + spread.get(v, 0.0) for v, value in curve.values.items()}
    return f'<path class="band c{number}" d="{_between(frame, low, high)}"/>'


def _between(frame: _Frame, low: Mapping[int, float], high: Mapping[int, float]) -> str:
    up = [f"{frame.x(v):.1f} {frame.y(value):.1f}" for v, value in high.items()]
    down = [f"{frame.x(v):.1f} {frame.y(value):.1f}" for v, value in low.items()]
    if len(up) == 1:  # one step alone still has a width
        x, y, bottom = frame.x(frame.first), frame.y(max(high.values())), frame.y(min(low.values()))
        return f"M{x - 20:.1f} {y:.1f}h40V{bottom:.1f}h-40Z"
    return f"M{'L'.join(up)}L{'L'.join(reversed(down))}Z"


def _drawn(frame: _Frame, curve: Curve, number: int) -> str:
    places = [(frame.x(version), frame.y(value)) for version, value in curve.values.items()]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    drawn = f'<path class="line c{number}" d="M{path}"/>'
    if curve.dots or len(places) == 1:
        for x, y in places:
            drawn += f'<circle class="area c{number}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    return drawn


def _hover(frame: _Frame, found: Mapping[str, Mapping[int, float]]) -> str:
    """An invisible strip for each place, with its figures as its title."""
    versions = sorted({version for values in found.values() for version in values})
    parts = []
    for at, version in enumerate(versions):
        left = _LEFT if at == 0 else (frame.x(versions[at - 1]) + frame.x(version)) / 2
        last = at == len(versions) - 1
        right = _WIDTH - _RIGHT if last else (frame.x(versions[at + 1]) + frame.x(version)) / 2
        figures = ", ".join(
            f"{name} {values[version]:.5g}" for name, values in found.items() if version in values
        )
        parts.append(
            f'<rect class="hover" x="{left:.1f}" y="{_TOP}" width="{max(0.0, right - left):.1f}" '
            f'height="{_HEIGHT - _TOP - _BOTTOM}">'
            f"<title>step {version}: {html.escape(figures)}</title></rect>"
        )
    return "".join(parts)


def _figure(title: str, names: Sequence[str], inner: str) -> str:
    legend = ""
    if len(names) > 1:
        keys = "".join(
            f'<span><i class="key c{number}"></i>{html.escape(name)}</span>'
            for number, name in enumerate(names)
        )
        legend = f'<div class="legend">{keys}</div>'
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>{legend}"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f"{inner}</svg></figure>\n"
    )
