"""What core offers to others."""

import difflib
import importlib
import pkgutil

import pytest

import asyncflow_core

from . import api


def _modules():
    found = [m.name for m in pkgutil.walk_packages(asyncflow_core.__path__, "asyncflow_core.")]
    return [name for name in found if not name.endswith("__main__")]


@pytest.mark.parametrize("name", _modules())
def test_module_exports_resolve(name):
    module = importlib.import_module(name)
    for exported in getattr(module, "__all__", ()):
        assert hasattr(module, exported)


def test_package_every_name_resolves_lazily():
    for name in asyncflow_core.__all__:
        assert getattr(asyncflow_core, name) is not None
    assert sorted(asyncflow_core.__all__) == sorted(set(asyncflow_core.__all__))
    assert set(asyncflow_core.__all__) <= set(dir(asyncflow_core))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = asyncflow_core.nothing


def test_package_type_checkers_see_the_same_names():
    """The imports under TYPE_CHECKING and the table of homes are two lists of one thing."""
    homes = asyncflow_core._HOMES
    assert {*homes, "open"} == set(asyncflow_core.__all__)
    for name, home in homes.items():
        module = importlib.import_module(f"asyncflow_core.{home}")
        assert name in module.__all__
        assert getattr(asyncflow_core, name) is getattr(module, name)


def test_api_changes_are_on_purpose():
    """A change of a public signature shows in tests/meta/api.txt."""
    written, found = api.SNAPSHOT.read_text().splitlines(), api.text().splitlines()
    difference = "\n".join(
        difflib.unified_diff(written, found, "api.txt", "code", lineterm="", n=0)
    )
    assert not difference, f"if this is meant, run {api.UPDATE}\n{difference}"
