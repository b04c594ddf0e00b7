"""`asyncflow check-plugin`: what holds passes, what does not is named, nothing hangs or stays."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from asyncflow_core.registry import KINDS
from asyncflow_core.testing.aio import eventually

from .conftest import COMMAND

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).parents[2]
SERVICES = ("data_store", "rollout", "trainer", "weight_sync")

PLUGIN = """\
from asyncflow_core.config import Section
from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import StageContract
from asyncflow_core.registry import NoOptions
from asyncflow_core.services.rollout import RolloutCapabilities
from asyncflow_core.services.trainer import LossCapabilities, LossOutput
from asyncflow_core.services.weight_sync import WeightSyncCapabilities
from asyncflow_core.reference.weight_sync import MEMORY_WEIGHT_SYNC, MemoryWeightSync
from pydantic import BaseModel

class Loose(BaseModel):
    size: int = 1

class Options(Section):
    size: int

{body}
@hookimpl
def asyncflow_register(registrar):
{registers}
"""


def plugin(registers, body=""):
    lines = "".join(f"    {line}\n" for line in registers.strip().splitlines())
    return PLUGIN.format(body=body, registers=lines)


def outcomes(report, part="offer", key="what"):
    return {each[key]: each["outcome"] for each in report[part]}


def text_of(report, what):
    return next(each["text"] for each in report["offer"] if each["what"] == what)


@pytest.fixture
def offered(site, check):
    """Install one plugin by its registration; then check it."""

    def call(label, registers, body="", *arguments):
        site.install("af-offered", {label: "af_offered"}, {"af_offered": plugin(registers, body)})
        return check(label, *arguments)

    return call


# What holds


@pytest.mark.parametrize(
    "kind",
    [
        *("stage", "loss"),
        *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k not in ("stage", "loss")),
    ],
)
def test_check_generated_package_passes(kind, site, check, tmp_path):
    site.generate(kind, "made", tmp_path / "made")
    done = check(f"{kind}.made")
    assert done.status == 0, done.out + done.err
    report = done.report
    assert (report["ok"], report["distribution"]) == (
        True,
        f"asyncflow-{kind}-made".replace("_", "-"),
    )
    assert set(outcomes(report).values()) == {"passed"}
    assert bool(report["clauses"]) == (kind in SERVICES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVICES)
def test_check_cites_every_clause_of_the_contract(kind, check):
    name = "memory" if kind in ("data_store", "weight_sync") else "tabular"
    options = ("--options", "{init_scale: 1.0}") if name == "tabular" else ()
    report = check(f"{kind}.{name}", *options).report
    page = (ROOT / "docs" / "spec" / f"{kind}.md").read_text()
    found = outcomes(report, "clauses", "clause")
    assert [clause for clause in found if f"**{clause}**" not in page] == []
    assert len(found) == page.count("- **")
    assert set(found.values()) <= {"passed", "not declared"}


@pytest.fixture
def echo(site):
    """The example, whose model only it knows."""
    points = {"rollout.echo": "asyncflow_echo.plugin", "stage.brevity": "asyncflow_echo.plugin"}
    site.install("asyncflow-echo", points)
    site.paths.append(ROOT / "examples" / "plugin_echo" / "src")
    return site


def test_check_example_by_options_passes_and_names_what_is_not_declared(echo, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("vocab_size: 7\n")
    done = echo.run(COMMAND, "check-plugin", "rollout.echo", "--options", file)
    assert done.status == 0, done.out + done.err
    assert "rollout.echo of asyncflow-echo 0.1.0 (asyncflow_echo.plugin)\n" in done.out
    assert "  RO-13           passed\n" in done.out  # its weights were found out
    assert "  RO-11           not declared  prefix\n" in done.out
    assert done.out.splitlines()[-1].startswith("22 clauses by 38 tests: ")
    assert done.err == ""


def test_check_without_an_option_it_needs_says_which(echo, check):
    done = check("rollout.echo")
    assert done.status == 2
    assert text_of(done.report, "options") == (
        "rollout.echo, option vocab_size: required, and missing; give what it needs by --options"
    )


# What does not hold


WEIGHTS = """
registrar.add("weight_sync", "bad", Bad, api_version=1, capabilities=MEMORY_WEIGHT_SYNC)
"""


def test_check_broken_clauses_fail_by_name_and_say_what_was_found(offered):
    body = """
from dataclasses import replace
class Bad(MemoryWeightSync):
    async def retire(self, version, life=0):
        self._check_open()
        if (version, life) not in self._held:
            raise KeyError(f"nobody holds {version}")
        await super().retire(version, life)
    async def stats(self):
        return replace(await super().stats(), bytes_published=7)
"""
    done = offered("weight_sync.bad", WEIGHTS, body)
    assert (done.status, done.report["ok"]) == (1, False)
    reasons = {c["clause"]: c["reason"] for c in done.report["clauses"] if c["outcome"] == "failed"}
    assert sorted(reasons) == ["WS-2", "WS-9"]
    assert reasons["WS-9"] == (
        "test_retire_unknown_version_is_no_error: KeyError: 'nobody holds 99'"
    )
    assert "assert ((4,), 7) == ((4,), " in reasons["WS-2"]
    failed = [test for test in done.report["tests"] if test["outcome"] == "failed"]
    assert "af_offered.py" in "".join(test["details"] for test in failed)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("os._exit(3)", "the process ended with status 3"),
        ("os.kill(os.getpid(), 9)", "the process was killed by signal 9 (SIGKILL)"),
        pytest.param("time.sleep(600)", "it did not end within 5 s", marks=pytest.mark.slow),
    ],
)
def test_check_plugin_that_ends_or_hangs_is_named_by_the_test_it_was_in(offered, act, words):
    body = f"""
import os, time
class Bad(MemoryWeightSync):
    async def attach(self, replica, published):
        {act}
"""
    done = offered("weight_sync.bad", WEIGHTS, body, "--timeout", "5")
    assert done.status == 1
    tests = {test["test"]: test for test in done.report["tests"]}
    failed = [test for test in tests.values() if test["outcome"] == "failed"]
    assert [(test["reason"], test["clauses"]) for test in failed] == [(words, ["WS-1"])]
    rest = [test for test in tests.values() if test["outcome"] == "not checked"]
    assert len(rest) > 10
    assert {test["reason"] for test in rest} == {f"{failed[0]['test']} did not end properly"}


FAULTS = {
    "no record": (
        'registrar.add("rollout", "bad", dict, api_version=1)',
        ("capabilities", "registered with None; give a RolloutCapabilities"),
    ),
    "senseless record": (
        'registrar.add("rollout", "bad", dict, api_version=1,'
        ' capabilities=RolloutCapabilities(sampling=frozenset({"top_q"})))',
        ("capabilities", "sampling is ['top_q']; it takes one or more of max_new_tokens"),
    ),
    "no rollout": (
        'registrar.add("rollout", "bad", dict, api_version=1, options=NoOptions,'
        " capabilities=RolloutCapabilities())",
        ("factory", "cannot be built: TypeError: dict expected at most 1 argument, got 2"),
    ),
    "loose options": (
        'registrar.add("rollout", "bad", dict, api_version=1, options=Loose)',
        ("options model", "Loose takes keys it does not know; derive it from"),
    ),
    "other version": (
        'registrar.add("rollout", "bad", dict, api_version=3)',
        ("module", "is written for API version 3, this core has 1"),
    ),
    "nothing": ("pass", ("module", "registers only []")),
    "not imported": ("pass\nimport this_is_not_there", ("module", "No module named")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_faulty_offer_is_named(offered, fault):
    registers, (what, words) = FAULTS[fault]
    done = offered("rollout.bad", registers)
    assert done.status == 1, done.out + done.err
    assert outcomes(done.report)[what] == "failed"
    assert words in text_of(done.report, what)
    assert done.report["tests"] == []


def test_check_names_every_fault_of_an_offer_at_once(offered):
    report = offered("rollout.bad", FAULTS["loose options"][0]).report
    failed = [what for what, outcome in outcomes(report).items() if outcome == "failed"]
    assert failed == ["options model", "capabilities", "factory"]


def test_check_module_that_imports_an_engine_fails(site, check):
    (site.folder / "vllm.py").write_text("")
    body = plugin('registrar.add("stage", "s", dict, api_version=1)', "import vllm")
    site.install("af-heavy", {"stage.s": "af_heavy"}, {"af_heavy": body})
    report = check("stage.s").report
    assert "it imports vllm; let the factory import it" in text_of(report, "module")


def test_check_declared_ability_without_its_methods_fails(offered):
    able = "WeightSyncCapabilities(overlapped_fetch=True)"
    register = (
        f'registrar.add("weight_sync", "bad", MemoryWeightSync, api_version=1, capabilities={able})'
    )
    report = offered("weight_sync.bad", register).report
    assert "it declares overlapped_fetch and is no SupportsOverlappedFetch" in text_of(
        report, "factory"
    )


def test_check_loss_whose_gradient_is_wrong_fails(offered):
    body = """
def loss(logprobs, columns, config):
    return LossOutput((logprobs ** 2).sum(), 1.0, grad=logprobs)
"""
    register = (
        'registrar.add("loss", "bad", lambda o, c: loss, api_version=1,'
        ' capabilities=LossCapabilities("numpy"))'
    )
    done = offered("loss.bad", register, body)
    assert done.status == 1
    assert "differences of the sum give" in text_of(done.report, "gradient")


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ('{"other": [1] * batch.rows}', "it returns ['other'], its contract says ['advantages']"),
        ('{"advantages": [[1.0]]}', "column 'advantages' has 1 rows, the batch has 4"),
        (
            '{"advantages": [[1.0]] * 4}',
            "column 'advantages' has 1 entries, but 'response_ids' has 3",
        ),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_check_stage_that_returns_something_else_fails(offered, returned, words):
    body = f"""
def stage(batch):
    return {returned}
"""
    register = (
        'registrar.add("stage", "bad", lambda o, c: stage, api_version=1,'
        ' contract=StageContract(("reward", "response_ids"), ("advantages",)))'
    )
    done = offered("stage.bad", register, body)
    assert done.status == 1
    assert any(words in each["text"] for each in done.report["offer"])


def test_check_what_only_a_run_has_is_not_checked_and_no_fault(offered):
    register = (
        'registrar.add("stage", "s", lambda o, c: print, api_version=1,'
        ' contract=StageContract(("answer",), ("reward",)))'
    )
    done = offered("stage.s", register)
    assert done.status == 0
    assert text_of(done.report, "call") == "it reads answer, which only your data has"


def test_check_plugin_that_prints_does_not_spoil_the_report(offered):
    body = 'print("hello from the module")'
    register = 'registrar.add("stage", "s", dict, api_version=1)'
    done = offered("stage.s", register, body)
    assert "hello from the module" in done.err
    assert done.report["plugin"] == "stage.s"


# What cannot be checked


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("rollout",), "'rollout' is not of the form KIND.NAME; kinds are data_store"),
        (("rolout.x",), "not of the form KIND.NAME"),
        (("rollout.tabulr",), "did you mean 'tabular'?"),
        (("rollout.tabular", "--options", "nobody.yaml"), "neither a file nor a mapping"),
        (("rollout.tabular", "--options", "{a: ["), "neither a file nor YAML"),
    ],
)
def test_check_what_is_not_there_ends_with_2(check, arguments, words):
    done = check(*arguments)
    assert (done.status, done.out) == (2, "")
    assert words in done.err


def test_check_without_pytest_says_how_to_get_it(check, monkeypatch):
    monkeypatch.setattr("asyncflow_core.cli.check_plugin.missing_packages", lambda: ["pytest"])
    done = check("weight_sync.memory")
    assert done.status == 2
    assert text_of(done.report, "kit") == (
        "it needs pytest; try: pip install 'asyncflow-core[testing]'"
    )
    assert done.report["tests"] == []


def test_check_rollout_whose_tensors_are_unknown_is_not_checked_in_full(offered):
    body = """
from asyncflow_core.errors import DataError
from asyncflow_core.reference.tabular_rollout import *
class Own(TabularRollout):
    async def stage_weights(self, source):
        raise DataError("no")
def make(options, ctx):
    return Own(TabularRolloutOptions(vocab_size=5), ctx)
"""
    register = 'registrar.add("rollout", "own", make, api_version=1, capabilities=TABULAR_ROLLOUT)'
    done = offered("rollout.own", register, body)
    assert done.status == 2, done.out
    found = {each["clause"]: each for each in done.report["clauses"]}
    assert found["RO-2"]["outcome"] == "passed"
    assert found["RO-13"]["outcome"] == "not checked"
    assert (
        "compare by asyncflow_core.services.weight_sync.check_tensors" in found["RO-13"]["reason"]
    )


@pytest.mark.slow
def test_check_trainer_that_starts_uniform_is_not_checked_at_temperatures(check):
    done = check("trainer.tabular")
    assert done.status == 2
    found = {c["clause"]: c["outcome"] for c in done.report["clauses"]}
    assert {clause for clause, outcome in found.items() if outcome != "passed"} == {"TR-3"}


# Nothing stays

HANGS = """
import pathlib, subprocess, sys, time
class Bad(MemoryWeightSync):
    async def attach(self, replica, published):
        sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(sleeps, start_new_session=True)
        pathlib.Path("pids").write_text(f"{__import__('os').getpid()} {child.pid}")
        time.sleep(600)
"""


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL],
)
async def test_check_that_is_ended_leaves_no_process_and_no_file(site, number, tmp_path):
    site.install(
        "af-offered", {"weight_sync.bad": "af_offered"}, {"af_offered": plugin(WEIGHTS, HANGS)}
    )
    (scratch := tmp_path / "tmp").mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(scratch),
        "PYTHONPATH": f"{site.folder}:{os.environ.get('PYTHONPATH', '')}",
    }
    process = subprocess.Popen(  # noqa: ASYNC220
        [COMMAND, "check-plugin", "weight_sync.bad"],
        cwd=site.folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    file = site.folder / "pids"

    def written():
        text = file.read_text() if file.is_file() else ""
        return len(text.split()) == 2

    await eventually(written, timeout_s=60)
    pids = [int(pid) for pid in file.read_text().split()]
    process.send_signal(number)
    status = process.wait(30)
    assert status == (-9 if number == signal.SIGKILL else 130)
    await eventually(lambda: not any(map(lives, pids)), timeout_s=30)
    await eventually(lambda: not list(scratch.iterdir()), timeout_s=30)


def lives(pid):
    """Not as a zombie, which a container's first process may leave."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
