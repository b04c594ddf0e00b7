"""Discovery with hand-made distributions on sys.path; nothing is installed."""

import sys
from types import ModuleType

import pytest

from asyncflow_core.errors import (
    ConfigError,
    PluginConflictError,
    PluginError,
    PluginIncompatibleError,
    PluginLoadError,
    PluginNotFoundError,
)
from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.registry import (
    API_VERSIONS,
    NoOptions,
    PluginEntry,
    Registrar,
    Registry,
    discover,
)

REGISTERS = """
from asyncflow_core.hookspecs import hookimpl
import sys
sys.modules[__name__].__dict__.setdefault("imports", []).append(1)

@hookimpl
def asyncflow_register(registrar):
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make a distribution: its entry points, and its modules' registrations (or whole source)."""
    monkeypatch.delenv("ASYNCFLOW_PLUGINS", raising=False)
    made = []

    def make(distribution, points, modules, *, version="1.2"):
        site = tmp_path / distribution
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        lines = [f"{name} = {module}" for name, module in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[asyncflow]", *lines, ""]))
        for module, offers in modules.items():
            source = offers
            if not isinstance(offers, str):
                adds = [
                    f"    registrar.add({kind!r}, {name!r}, dict, api_version={api})"
                    for kind, name, api in offers
                ]
                source = REGISTERS + "\n".join(adds or ["    pass"]) + "\n"
            (site / f"{module}.py").write_text(source)
            made.append(module)
        monkeypatch.syspath_prepend(str(site))

    yield make
    for module in made:
        sys.modules.pop(module, None)


def labels(entries):
    return [(e.label, e.distribution) for e in entries if e.distribution.startswith("af-")]


def hand_made(name, *offers):
    module = ModuleType(name)

    @hookimpl
    def asyncflow_register(registrar):
        for kind, offered, api in offers:
            registrar.add(kind, offered, dict, api_version=api)

    module.asyncflow_register = asyncflow_register
    return module


def test_discover_finds_kind_name_version_without_import(install):
    install("af-one", {"rollout.fast": "af_one_mod"}, {"af_one_mod": "raise ImportError"})
    (entry,) = [e for e in discover() if e.distribution == "af-one"]
    assert entry == PluginEntry("rollout", "fast", "af_one_mod", "af-one", "1.2")
    assert "af_one_mod" not in sys.modules
    assert "fast" in Registry().names("rollout")


def test_get_imports_module_once_for_all_its_names(install):
    points = {"rollout.a": "af_multi", "trainer.b": "af_multi"}
    install("af-multi", points, {"af_multi": [("rollout", "a", 1), ("trainer", "b", 1)]})
    registry = Registry()
    first = registry.get("rollout", "a")
    assert registry.get("rollout", "a") is first
    assert registry.get("trainer", "b").distribution == "af-multi"
    assert sys.modules["af_multi"].imports == [1]


def test_get_two_modules_of_one_distribution_each_its_own(install):
    install(
        "af-two",
        {"rollout.a": "af_two_a", "trainer.b": "af_two_b"},
        {"af_two_a": [("rollout", "a", 1)], "af_two_b": [("trainer", "b", 1)]},
    )
    registry = Registry()
    assert registry.get("trainer", "b").kind == "trainer"
    assert "af_two_a" not in sys.modules
    assert registry.get("rollout", "a").kind == "rollout"


def test_get_unknown_name_says_near_names_and_pip_line(install, monkeypatch):
    install("af-near", {"rollout.turbo": "af_near"}, {"af_near": [("rollout", "turbo", 1)]})
    monkeypatch.setenv("ASYNCFLOW_PLUGINS", "af-near")
    registry = Registry()
    with pytest.raises(PluginNotFoundError, match="did you mean 'turbo'"):
        registry.get("rollout", "turob")
    with pytest.raises(PluginNotFoundError) as error:
        registry.get("rollout", "transfomers")
    assert "did you mean 'transformers'?; try: pip install asyncflow-transformers" in str(
        error.value
    )
    with pytest.raises(PluginNotFoundError) as error:
        registry.get("rollout", "transformers")
    assert str(error.value).endswith("; try: pip install asyncflow-transformers")
    assert "did you mean" not in str(error.value)
    with pytest.raises(PluginNotFoundError, match="no plugin kind 'rolout'; kinds are"):
        registry.get("rolout", "turbo")
    with pytest.raises(PluginNotFoundError, match=r"\(installed: none\)"):
        Registry([]).get("rollout", "zzz")


@pytest.mark.parametrize("source", ["raise OSError('no driver')", "raise SystemExit('no driver')"])
def test_get_import_fails_names_distribution_and_cause_others_unharmed(install, source):
    points = {"rollout.bad": "af_bad", "rollout.good": "af_good"}
    install("af-mixed", points, {"af_bad": source, "af_good": [("rollout", "good", 1)]})
    registry = Registry()
    for _ in range(2):
        with pytest.raises(PluginLoadError, match=r"af-mixed 1\.2 failed .*: no driver") as error:
            registry.get("rollout", "bad")
        assert isinstance(error.value.__cause__, OSError | SystemExit)
    assert registry.get("rollout", "good").name == "good"


def test_get_registration_fails_nothing_of_the_module_is_left(install):
    source = REGISTERS + "    registrar.add('rollout', 'half', dict, api_version=1)\n    1 / 0\n"
    install("af-half", {"rollout.half": "af_half"}, {"af_half": source})
    registry = Registry()
    with pytest.raises(PluginLoadError, match="ZeroDivisionError"):
        registry.get("rollout", "half")


def test_get_two_distributions_one_name_both_named(install):
    install("af-left", {"rollout.same": "af_left"}, {"af_left": [("rollout", "same", 1)]})
    install("af-right", {"rollout.same": "af_right"}, {"af_right": [("rollout", "same", 1)]})
    with pytest.raises(PluginConflictError, match=r"af-left \(af_left\) and af-right \(af_right\)"):
        Registry().get("rollout", "same")


def test_get_conflict_resolved_by_environment(install, monkeypatch):
    install("af-left", {"rollout.same": "af_left"}, {"af_left": [("rollout", "same", 1)]})
    install("af-right", {"rollout.same": "af_right"}, {"af_right": [("rollout", "same", 1)]})
    monkeypatch.setenv("ASYNCFLOW_PLUGINS", "other, AF_Right")
    assert Registry().get("rollout", "same").distribution == "af-right"
    monkeypatch.setenv("ASYNCFLOW_PLUGINS", "")
    assert labels(discover()) == []


def test_discover_core_stays_under_restriction(install, monkeypatch):
    install("asyncflow-core", {"rollout.core": "af_core"}, {"af_core": [("rollout", "core", 1)]})
    monkeypatch.setenv("ASYNCFLOW_PLUGINS", "")
    assert "core" in Registry().names("rollout")


def test_discover_distribution_seen_twice_first_on_path_wins(install, tmp_path, monkeypatch):
    install("af-twice", {"rollout.x": "af_twice"}, {"af_twice": [("rollout", "x", 1)]})
    info = tmp_path / "copy" / "af_twice-9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: af-twice\nVersion: 9\n")
    (info / "entry_points.txt").write_text("[asyncflow]\nrollout.x = af_twice\n")
    monkeypatch.syspath_prepend(str(tmp_path / "copy"))
    assert [e.version for e in discover() if e.distribution == "af-twice"] == ["9"]


def test_discover_name_without_kind_left_out_with_warning(install, caplog):
    install("af-odd", {"fast": "af_odd", "rollout.ok": "af_odd"}, {"af_odd": []})
    assert labels(discover()) == [("rollout.ok", "af-odd")]
    assert "'fast' of af-odd" in caplog.text


@pytest.mark.parametrize(
    ("offset", "upgrade"), [(1, "asyncflow-core"), (-2, "af-api")], ids=["newer", "older"]
)
def test_get_other_api_version_says_what_to_upgrade(install, offset, upgrade):
    api = API_VERSIONS["rollout"] + offset
    install("af-api", {"rollout.v": "af_api"}, {"af_api": [("rollout", "v", api)]})
    with pytest.raises(PluginIncompatibleError, match=f"pip install --upgrade {upgrade}"):
        Registry().get("rollout", "v")


def test_get_api_version_before_ours_taken(install):
    api = API_VERSIONS["rollout"] - 1
    install("af-old", {"rollout.old": "af_old"}, {"af_old": [("rollout", "old", api)]})
    assert Registry().get("rollout", "old").name == "old"


def test_get_entry_point_not_registered_says_what_is(install):
    install("af-lost", {"rollout.lost": "af_lost"}, {"af_lost": [("rollout", "found", 1)]})
    with pytest.raises(PluginLoadError, match=r"registers only \['rollout.found'\]"):
        Registry().get("rollout", "lost")


def test_get_module_without_hook_or_with_unknown_hook_refused(install):
    unknown = (
        "from asyncflow_core.hookspecs import hookimpl\n"
        "@hookimpl\ndef asyncflow_regster(registrar): pass\n"
    )
    points = {"rollout.none": "af_none", "rollout.typo": "af_typo"}
    install("af-hooks", points, {"af_none": "", "af_typo": unknown})
    registry = Registry()
    with pytest.raises(PluginLoadError, match="implements no asyncflow_register"):
        registry.get("rollout", "none")
    with pytest.raises(PluginLoadError, match="asyncflow_regster"):
        registry.get("rollout", "typo")


def test_registrar_unknown_kind_or_name_twice_refused():
    with pytest.raises(PluginError, match="kind 'rolout'; kinds are data_store"):
        Registry([]).add(hand_made("m", ("rolout", "a", 1)))
    with pytest.raises(PluginConflictError, match=r"'rollout\.a' twice"):
        Registry([]).add(hand_made("m", ("rollout", "a", 1), ("rollout", "a", 1)))


def test_add_by_hand_wins_and_may_be_repeated(install):
    install("af-mine", {"rollout.mine": "af_mine"}, {"af_mine": [("rollout", "mine", 1)]})
    registry = Registry()
    module = hand_made("by_hand", ("rollout", "mine", 1))
    registry.add(module)
    registry.add(module)
    registry.add(hand_made("by_hand", ("rollout", "mine", 1)))
    assert registry.get("rollout", "mine").distribution == "(python)"


def test_add_module_that_an_entry_point_also_names(install):
    install("af-both", {"rollout.both": "af_both"}, {"af_both": [("rollout", "both", 1)]})
    registry = Registry()
    registry.get("rollout", "both")
    registry.add(sys.modules["af_both"])
    assert registry.get("rollout", "both").distribution == "(python)"


@pytest.mark.parametrize(
    ("factory", "options", "why"),
    [
        (7, NoOptions, r"has the factory 7, which cannot be called; give a class or a function"),
        (dict, dict, r"has the options <class 'dict'>; give a pydantic model, a subclass of asy"),
        (dict, {"x": 1}, r"has the options \{'x': 1\}; give a pydantic model"),
    ],
)
def test_add_offer_of_no_use_is_named(factory, options, why):
    with pytest.raises(PluginError, match=f"^rollout plugin 'a' of af-odd {why}"):
        Registrar("af-odd").add("rollout", "a", factory, api_version=1, options=options)


def test_discover_allow_list_with_a_name_that_offers_nothing_warns(install, monkeypatch, caplog):
    install("af-right", {"rollout.right": "af_right"}, {})
    monkeypatch.setenv("ASYNCFLOW_PLUGINS", "af_right, af-wrong,")
    assert "af-right" in {entry.distribution for entry in discover()}
    assert [message.split(",")[0] for message in caplog.messages] == [
        "ASYNCFLOW_PLUGINS names af-wrong"
    ]
    caplog.clear()
    monkeypatch.setenv("ASYNCFLOW_PLUGINS", "")
    discover()
    assert caplog.messages == []


def test_parse_options_all_faults_named():
    registry = Registry([])
    registry.add(hand_made("m", ("rollout", "a", 1)))
    with pytest.raises(ConfigError) as error:
        registry.get("rollout", "a").parse_options({"x": 1, "y": 2})
    assert [fault.split(":")[0] for fault in error.value.faults] == [
        "rollout.a, option x",
        "rollout.a, option y",
    ]
    assert error.value.faults[0].endswith("unknown key; there are no keys here")
