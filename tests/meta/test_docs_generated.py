"""Generated parts of the pages are up to date; links lead somewhere; pages are ASCII."""

import importlib.util
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted([*ROOT.glob("docs/design/*.md"), *ROOT.glob("docs/guides/*.md")]),
    *(ROOT / name for name in ("docs/safety.md", "docs/sources.md")),
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")),
]
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_equal_what_is_written(generate):
    missing = {e.module for e in generate.own_entries() if not find_spec(e.module.split(".")[0])}
    if missing:
        pytest.skip(f"not installed: {sorted(missing)}")
    stale = [page.name for page, text in generate.pages() if page.read_text("utf-8") != text]
    assert not stale, "run: python docs/generate.py"


def test_every_error_has_advice(generate):
    page = (ROOT / "docs" / "guides" / "errors.md").read_text("utf-8")
    advice = page.split("## What to do")[1].split("\n## ")[0]
    codes = re.findall(r"^\| `(\w+)` \| `\w+` \|", generate.error_table(), re.MULTILINE)
    assert [code for code in codes if f"`{code}`" not in advice] == ["asyncflow"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_is_ascii_and_its_links_lead_somewhere(page):
    text = page.read_bytes().decode("ascii")
    broken = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert not broken
