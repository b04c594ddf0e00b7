"""Every clause of a service's spec is cited by a test of its kit, and the other way round."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLAUSE = re.compile(r"\b(?:DS|RO|TR|WS)-\d+\b")


@pytest.mark.parametrize("service", ["data_store", "rollout", "trainer", "weight_sync"])
def test_spec_clauses_equal_those_the_kit_cites(service):
    spec = (ROOT / "docs" / "spec" / f"{service}.md").read_text()
    kit = (ROOT / "asyncflow_core" / "testing" / f"{service}.py").read_text()
    numbered = re.findall(r"^- \*\*([A-Z]+-\d+)\*\*", spec, re.MULTILINE)
    assert len(set(numbered)) == len(numbered)
    assert set(CLAUSE.findall(kit)) == set(numbered)
