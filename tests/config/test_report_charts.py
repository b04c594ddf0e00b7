"""Curves of a report: well-formed, inside their frame, whatever the values."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncflow_core.cli.report.charts import Curve, bars, curves, stack, ticks

WIDTH, HEIGHT = 480, 200
numbers = st.floats(-1e100, 1e100)
values = st.dictionaries(st.integers(0, 2**31 - 1), numbers, max_size=30)
curve = st.builds(
    Curve, name=st.text(max_size=8), values=values, spread=st.none() | values, dots=st.booleans()
)


def svg_of(figure):
    """The picture; its numbers are all inside the frame."""
    picture = re.search("<svg.*</svg>", figure, re.DOTALL).group()
    picture = "".join(c if c.isprintable() else "?" for c in picture)
    root = ElementTree.fromstring(picture)
    for element in root.iter():
        for name, limit in (("x", WIDTH), ("y", HEIGHT), ("cx", WIDTH), ("cy", HEIGHT)):
            if name in element.attrib:
                assert -4 <= float(element.get(name)) <= limit + 4
        for pair in re.findall(r"[ML](\S+) ([^\sLMHZVh]+)", element.get("d", "")):
            assert all(-21 <= float(place) <= WIDTH + 21 for place in pair)
    return root


@given(st.lists(curve, max_size=3), st.none() | numbers, st.booleans())
@example([Curve("a", {1: 5e-324, 2: 0.0})], None, False)
@example([Curve("a", {1: 1.0, 2: 1.0000000000000002})], None, False)
@example([Curve("a", {1: -1e100, 2: 1e100})], 0.0, True)
def test_curves_any_values_stay_in_the_frame(found, line, zero):
    figure = curves("t", found, line=line, zero=zero)
    assert bool(figure) == any(one.values for one in found)
    if figure:
        svg_of(figure)


@given(st.dictionaries(st.sampled_from("abcd"), values, max_size=4))
def test_stack_any_values_stay_in_the_frame(layers):
    figure = stack("t", layers)
    if figure:
        svg_of(figure)


@given(st.dictionaries(st.integers(0, 10**9), st.integers(0, 10**12), max_size=12))
def test_bars_any_counts_stay_in_the_frame(counts):
    figure = bars("t", counts)
    assert bool(figure) == (sum(counts.values()) > 0)
    if figure:
        svg_of(figure)


@given(numbers, numbers)
def test_ticks_are_few_in_order_and_between(low, high):
    low, high = min(low, high), max(low, high)
    found = ticks(low, high)
    assert len(found) <= 7
    assert found == sorted(found)
    slack = 1e-6 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in found)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (-3, 12, [0, 5, 10]), (0, 60, [0, 20, 40, 60])],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_curves_of_a_long_run_have_few_places_with_the_mean_of_their_steps():
    long = {version: float(version % 2) for version in range(1, 128_001)}
    root = svg_of(curves("t", [Curve("a", long), Curve("b", long, merge=max)]))
    places = [element for element in root.iter() if element.get("class") == "hover"]
    assert len(places) <= 161
    assert "a 0.5, b 1" in "".join(places[50].itertext())


def test_curves_names_are_escaped():
    assert "<b>" not in curves("<b>", [Curve("<b>", {1: 1.0}), Curve("&", {2: 1.0})])


def test_bars_say_their_count_and_share():
    root = svg_of(bars("t", {0: 1, 3: 3}))
    titles = ["".join(e.itertext()) for e in root.iter() if e.get("class") == "area c0"]
    assert titles == ["0: 1 rows, 25.0%", "3: 3 rows, 75.0%"]
