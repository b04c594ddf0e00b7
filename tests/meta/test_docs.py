"""Documents agree with the code they describe."""

import inspect
import re

import pytest

from asyncflow_core import hookspecs, metrics

from .conftest import ROOT, product_files, text_files

ROW = re.compile(r"^\| `([a-z_0-9]+/[a-z_0-9]+)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
CLAUSE = re.compile(r"\b(?:DS|RO|TR|WS)-\d+\b")
NUMBERED = re.compile(r"^- \*\*((?:DS|RO|TR|WS)-\d+)\*\*", re.MULTILINE)


def test_metrics_each_is_documented_with_unit_and_meaning():
    rows = ROW.findall((ROOT / "docs" / "metrics.md").read_text())
    documented = [name for name, unit, meaning in rows if unit.strip() and meaning.strip()]
    assert len(set(documented)) == len(documented)
    ours = {value for name, value in vars(metrics).items() if name.isupper()}
    of_plugins = set()
    for file in product_files():
        of_plugins |= set(re.findall(r'"(loss/[a-z_0-9]+)"', file.read_text()))
    assert set(documented) == ours | of_plugins


def test_metrics_each_constant_is_measured_somewhere():
    code = "".join(f.read_text() for f in product_files() if f.name != "metrics.py")
    unused = [n for n in vars(metrics) if n.isupper() and f"metrics.{n}" not in code]
    assert not unused


def _hooks():
    return {
        name: spec
        for name, spec in vars(hookspecs).items()
        if name.startswith("asyncflow_") and inspect.isfunction(spec)
    }


def test_hooks_page_lists_each_with_its_exact_arguments():
    page = (ROOT / "docs" / "plugins" / "hooks.md").read_text()
    headings = re.findall(r"^## `(\w+)\(([^)]*)\)`$", page, re.MULTILINE)
    expected = {name: ", ".join(inspect.signature(f).parameters) for name, f in _hooks().items()}
    assert dict(headings) == expected
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        name, arguments = re.match(r"`(\w+)\(([^)]*)\)`", section).groups()
        listed = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
        assert listed == [a for a in arguments.split(", ") if a], name


@pytest.mark.parametrize("name", sorted(_hooks()))
def test_hook_docstring_has_its_headings(name):
    doc = inspect.getdoc(_hooks()[name])
    for heading in ("Args:", "Runs in:", "Not called:"):
        assert heading in doc
    for argument in inspect.signature(_hooks()[name]).parameters:
        assert f"{argument}:" in doc


def test_spec_clauses_each_is_cited_by_a_test_and_the_other_way_round():
    numbered = []
    for page in sorted((ROOT / "docs" / "spec").glob("*.md")):
        numbered += NUMBERED.findall(page.read_text())
    assert len(set(numbered)) == len(numbered)
    cited = set()
    for file in text_files():
        of_tests = "tests" in file.parts or "testing" in file.parts
        if of_tests and file.suffix == ".py":
            cited |= set(CLAUSE.findall(file.read_text()))
    assert set(numbered) - cited == set()
    assert cited - set(numbered) == set()


def test_pages_links_to_files_of_the_tree_lead_somewhere():
    link = re.compile(r"\]\((?!\w+:)([^)#\s]+)(?:#[^)]*)?\)")
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in text_files()
        if page.suffix == ".md"
        for target in link.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken
