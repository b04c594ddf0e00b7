"""`asyncflow new-plugin`: what it writes is a package that works, for every kind."""

import sys
import tomllib

import pytest

from asyncflow_core.cli.main import main
from asyncflow_core.cli.new_plugin import package_files
from asyncflow_core.registry import KINDS, PluginEntry, Registry

SERVICES = ("data_store", "rollout", "trainer", "weight_sync")


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    """Run `asyncflow ARGUMENTS` in an empty folder: status, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def call(*arguments):
        return main([*map(str, arguments)]), *capsys.readouterr()

    return call


@pytest.mark.parametrize("kind", KINDS)
def test_package_registers_what_its_entry_point_names(kind, tmp_path, monkeypatch):
    name = f"made_for_{kind}"  # a module name of its own: it is imported into this process
    for path, text in package_files(kind, name).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    ((label, module),) = project["entry-points"]["asyncflow"].items()
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    registry = Registry([PluginEntry(*label.split("."), module, project["name"], "0.1.0")])
    assert label == registry.get(kind, name).label == f"{kind}.{name}"


def test_package_longest_name_keeps_lines_short():
    for kind in KINDS:
        for path, text in package_files(kind, "n" * 30).items():
            if path.endswith(".py"):
                assert max(map(len, text.splitlines()), default=0) <= 100, path


def test_packages_pass_their_own_tests(site, tmp_path):
    """One pytest over all kinds: their tests take less than starting ten times."""
    folders = [site.generate(kind, "made", tmp_path / kind) for kind in KINDS if kind != "launcher"]
    settings = tmp_path / "pytest.ini"
    settings.write_text(
        "[pytest]\nasyncio_mode = auto\nfilterwarnings = error\n"
        "asyncio_default_fixture_loop_scope = function\n"
    )
    tests = [folder / "tests" for folder in folders]
    done = site.run(sys.executable, "-m", "pytest", "-q", "-c", settings, *tests)
    assert done.status == 0, done.out
    assert "skipped" in done.out  # what the kits do not find declared


@pytest.mark.slow
@pytest.mark.multiproc
def test_package_launcher_passes_its_own_test(site, tmp_path):
    folder = site.generate("launcher", "made", tmp_path / "launcher")
    done = site.run(sys.executable, "-m", "pytest", "-q", cwd=folder)
    assert done.status == 0, done.out


def test_packages_are_clean_by_ruff(site, tmp_path):
    for kind in KINDS:
        site.generate(kind, "made", tmp_path / "made" / kind)
    for command in (("check",), ("format", "--check")):
        ruff = (sys.executable, "-m", "ruff", *command, "--no-cache", tmp_path / "made")
        done = site.run(*ruff)
        assert done.status == 0, done.out + done.err


@pytest.mark.slow
def test_packages_are_clean_by_mypy(site, tmp_path):
    folders = [site.generate(kind, "made", tmp_path / kind) for kind in KINDS]
    settings = ("--config-file", folders[0] / "pyproject.toml", "--cache-dir", tmp_path / "cache")
    sources = [folder / "src" for folder in folders]
    done = site.run(sys.executable, "-m", "mypy", *settings, *sources, timeout=600)
    assert done.status == 0, done.out + done.err


@pytest.mark.slow
def test_package_as_pip_installs_it_is_found(site, check, tmp_path):
    folder = site.generate("stage", "made", tmp_path / "made")
    site.paths = [tmp_path / "target"]
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    options = ("--no-deps", "--no-build-isolation", "--target", tmp_path / "target")
    done = site.run(*pip, *options, folder)
    assert done.status == 0, done.err
    found = check("stage.made")
    assert (found.status, found.report["distribution"]) == (0, "asyncflow-stage-made")


CONFIG = """\
name: made
tokenizer: {plugin: made}
prompts: {plugin: made, options: {epoch_size: 8}}
rollout: {plugin: made, sampling: {max_new_tokens: 2}}
trainer: {plugin: made}
loss: {plugin: made}
stages:
  reward: {function: "rewards:even", kind: reward}
  advantage: {plugin: made}
data_store: {plugin: made}
weight_sync: {plugin: made}
launcher: {plugin: made}
workflow: {steps: 2, groups_per_step: 4, group_size: 2}
evaluation: null
"""


@pytest.mark.slow
@pytest.mark.multiproc
def test_packages_make_a_run_together(site, tmp_path):
    for kind in KINDS:
        site.generate(kind, "made", tmp_path / kind)
    (site.folder / "rewards.py").write_text(
        "def even(response, answer):\n    return float(len(answer) % 2)\n"
    )
    (site.folder / "config.yaml").write_text(CONFIG)
    done = site.run(sys.executable, "-m", "asyncflow_core.cli", "run", "config.yaml")
    assert done.status == 0, done.out + done.err
    assert "16 rows trained" in done.out


def test_new_plugin_writes_the_package_and_says_what_is_next(command, tmp_path):
    status, out, err = command("new-plugin", "weight_sync", "my_link")
    assert (status, err) == (0, "")
    folder = tmp_path / "asyncflow-weight-sync-my-link"
    written = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
    expected = package_files("weight_sync", "my_link")
    assert {path: file.read_text() for path, file in written.items()} == expected
    assert [entry.name for entry in tmp_path.iterdir()] == [folder.name]
    for line in (*expected, "cd asyncflow-weight-sync-my-link", "pip install -e '.[test]'"):
        assert f"  {line}\n" in out
    assert "asyncflow check-plugin weight_sync.my_link" in (folder / "README.md").read_text()
    assert "weight_sync:\n  plugin: my_link\n" in (folder / "README.md").read_text()


def test_new_plugin_into_an_empty_folder(command, tmp_path):
    (tmp_path / "empty").mkdir()
    assert command("new-plugin", "stage", "mine", "--out", "empty")[0] == 0
    assert (tmp_path / "empty" / "pyproject.toml").is_file()


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("rolout", "mine", "no plugin kind 'rolout'; kinds are data_store, rollout,"),
        ("rollout", "tabular", "rollout.tabular is offered by asyncflow-core"),
        ("rollout", "My-Engine", "as 'my_engine'"),
        ("rollout", "", "cannot be called ''"),
        ("rollout", "1st", "lower-case letter"),
        ("rollout", "a__b", "as 'a_b'"),
        ("rollout", "../up", "as 'up'"),
        ("rollout", "a" * 31, "up to 29 lower-case letters"),
        ("loss", "lambda", "a word of Python"),
        ("loss", "mine\n", "as 'mine'"),
    ],
)
def test_new_plugin_name_of_no_use_refused_and_nothing_written(
    command, tmp_path, kind, name, words
):
    status, out, err = command("new-plugin", kind, name)
    assert (status, out) == (2, "")
    assert words in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", ["full", "file", "link"])
def test_new_plugin_overwrites_nothing(command, tmp_path, there):
    target = tmp_path / "there"
    if there == "full":
        target.mkdir()
        (target / "mine.txt").write_text("precious")
    elif there == "file":
        target.write_text("precious")
    else:
        target.symlink_to(tmp_path / "nowhere")
    status, _, err = command("new-plugin", "stage", "mine", "--out", "there")
    assert status == 2
    assert "there is there already" in err
    assert [entry.name for entry in tmp_path.iterdir()] == ["there"]
    if there == "full":
        assert [entry.name for entry in target.iterdir()] == ["mine.txt"]


def test_new_plugin_tells_all_faults_at_once(command, tmp_path):
    (tmp_path / "there").write_text("")
    _, _, err = command("new-plugin", "rollout", "tabular", "--out", "there")
    assert "2 fault(s)" in err
    assert "there is there already" in err
    assert "choose another name" in err


def test_new_plugin_where_nothing_can_be_written_leaves_nothing(command, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    status, _, err = command("new-plugin", "stage", "mine")
    assert status == 2
    assert "asyncflow-stage-mine cannot be written: No space left on device" in err
    assert not list(tmp_path.iterdir())


def test_new_plugin_below_a_file_refused(command, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = command("new-plugin", "stage", "mine", "--out", "file/below")
    assert status == 2
    assert "file/below cannot be written: " in err
