"""The command as a user starts it: a process of its own, in the user's folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncflow_core.cli.main import main
from asyncflow_core.cli.progress import Progress
from asyncflow_core.config import RunConfig
from asyncflow_core.errors import ConfigError
from asyncflow_core.flow.running.results import StepResult

from .conftest import BASE, distribution

COMMAND = Path(sys.executable).with_name("asyncflow")

LATE = """\
from asyncflow_core import ConfigError, hookimpl
from asyncflow_core.parts import StageContract

def build(options, ctx):
    raise ConfigError("the judge's key is not set")

@hookimpl
def asyncflow_register(registrar):
    contract = StageContract((), ("answer",))
    registrar.add("prompts", "late", build, api_version=1, contract=contract)
"""

pytestmark = pytest.mark.multiproc


@pytest.fixture
def asyncflow(folder, tmp_path):
    """Run the installed command; its own environment, this test's plugins on PYTHONPATH."""

    def call(*arguments, by=(), environment=(), **streams):
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith("ASYNCFLOW")
        }
        path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            [*by, COMMAND, *map(str, arguments)],
            cwd=folder,
            env={**inherited, "PYTHONPATH": path, **dict(environment)},
            text=True,
            timeout=60,
            check=False,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
        )

    return call


def test_command_finds_functions_in_the_folder_where_it_is_started(asyncflow, write):
    done = asyncflow("doctor", write(), "--json")
    assert done.stderr == ""
    assert done.returncode == 0
    assert json.loads(done.stdout)["tasks"]["reward"]["reads"] == ["response_ids", "answer"]


def test_command_plugin_that_raises_on_import_is_named_and_nothing_starts(asyncflow, write, folder):
    path = write(BASE.replace("plugin: tabular\n  options: {slots: 4}", "plugin: broken"))
    doctor, run = asyncflow("doctor", path), asyncflow("run", path)
    for done, text in ((doctor, doctor.stdout), (run, run.stderr)):
        assert done.returncode == 2
        assert f"{path}:6: rollout.plugin: rollout plugin 'broken' of af-broken 1.0 failed" in text
        assert "No module named 'this_module_is_not_there'" in text
        assert "Traceback" not in done.stdout + done.stderr
    assert "1 fault(s), nothing was started" in run.stderr
    assert not (folder / "runs").exists()


def test_command_broken_plugin_that_nobody_chose_does_no_harm(asyncflow, write):
    assert asyncflow("doctor", write()).returncode == 0


def test_command_two_distributions_with_one_name_are_both_named(asyncflow, write, tmp_path):
    distribution(tmp_path / "site", "af-twin", {"rollout.plain": "x"}, {})
    done = asyncflow("doctor", write(), "rollout={plugin: plain}")
    assert done.returncode == 2
    assert "af-config (af_config_fakes) and af-twin (x)" in done.stdout


BUFFERED = [{"PYTHONUNBUFFERED": ""}, {"PYTHONUNBUFFERED": "1"}]


@pytest.mark.parametrize("environment", BUFFERED)
@pytest.mark.parametrize("verb", ["plugins", "doctor", "--help", "--version", "keys"])
def test_command_whose_output_is_full_says_so_and_ends_with_1(asyncflow, write, verb, environment):
    arguments = {"doctor": ["doctor", write()], "keys": ["keys", "new", "k"]}.get(verb, [verb])
    with open("/dev/full", "w") as full:
        done = asyncflow(*arguments, stdout=full, environment=environment)
    assert done.stderr == ("asyncflow: what it prints cannot be written: No space left on device\n")
    assert done.returncode == 1


def test_command_without_standard_streams_does_its_work(asyncflow, write, folder):
    # As some daemons start it; what is opened next must not take the streams' numbers.
    closed = ("sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-')
    assert asyncflow("doctor", write(), by=closed).returncode == 0
    assert asyncflow("doctor", "nobody.yaml", by=closed).returncode == 2
    assert asyncflow("run", write(), *INLINE, by=closed).returncode == 0
    assert (folder / "runs" / "mine" / "summary.json").is_file()


def test_command_in_a_folder_that_was_deleted_says_so(asyncflow, write):
    gone = ("sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$0" "$@"')
    for arguments in (["run", write()], ["--help"]):
        done = asyncflow(*arguments, by=gone)
        assert done.returncode == 2
        assert done.stderr.startswith("asyncflow: the folder where it is started was deleted")


def test_command_output_of_a_narrow_encoding_escapes_what_it_has_not(asyncflow, write):
    done = asyncflow("doctor", write(), "name=\u00e9", environment={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 2
    assert "got '\\xe9'" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("environment", BUFFERED)
def test_run_whose_reader_goes_away_ends_with_the_status_of_its_work(
    asyncflow, write, folder, environment
):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = asyncflow("run", write(), *INLINE, stdout=pipe, environment=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be shown any more") == 1
    assert "Exception ignored" not in done.stderr
    assert (folder / "runs" / "mine" / "summary.json").is_file()


def test_run_resumed_with_a_configuration_says_that_it_has_its_own(asyncflow, write):
    done = asyncflow("run", write(), "--resume", "runs/mine")
    assert done.returncode == 2
    assert "goes on with a run by its own configuration; leave CONFIG" in done.stderr


INLINE = (
    *("launcher={plugin: inline}", "weight_sync={plugin: memory}"),
    "stages.advantage={function: 'my_reward:plain', writes: [advantages], reads: [response_ids]}",
)
LATE_PROMPTS = "prompts={plugin: late}"


def test_run_says_where_an_earlier_one_of_its_name_went(asyncflow, write, folder):
    first, second = (asyncflow("run", write(), *INLINE) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0)
    assert first.stdout.startswith("run mine: ")
    lines = second.stdout.splitlines()
    assert lines[0] == "an earlier run of this name was moved to runs/mine-1/"
    assert lines[1].startswith("run mine: ")
    assert (folder / "runs" / "mine-1" / "summary.json").is_file()


def test_run_whose_start_is_refused_does_not_say_that_it_starts(asyncflow, write, folder):
    (folder / "file").write_text("")
    done = asyncflow("run", write(), *INLINE, "out=file")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "nothing was started:\n  out: the run's folder" in done.stderr


FAILS_LATER = """

calls = []

def later(response):
    calls.append(response)
    if len(calls) > 24:
        raise KeyError("judge")
    return 0.0
"""


def test_run_that_fails_says_how_to_go_on_where_there_is_a_checkpoint(asyncflow, write, folder):
    with (folder / "my_reward.py").open("a") as file:
        file.write(FAILS_LATER)
    failing = ("stages.reward.function=my_reward:later", "workflow.steps=9", "rollout.options={}")
    by_step = (*INLINE, *failing, "workflow.max_staleness=0")  # so that step 4 has row 25
    done = asyncflow("run", write(), *by_step, "checkpoint.every=2")
    assert done.returncode == 1
    *_, said, how = done.stderr.splitlines()
    assert "all 8 rewards of step 4 failed" in said
    assert "(my_reward:later): KeyError: 'judge'" in said
    assert how == "asyncflow: `asyncflow run --resume runs/mine` goes on from step 2"
    done = asyncflow("run", "--resume", "runs/mine")
    assert done.stdout.startswith("run mine, resumed from step 2: ")
    done = asyncflow("run", write(), *by_step)
    assert "all 8 rewards of step 4 failed" in done.stderr
    assert "--resume" not in done.stderr


def test_command_configuration_fault_after_the_start_does_not_say_nothing_was_started(
    asyncflow, write, folder, tmp_path
):
    distribution(tmp_path / "site", "af-late", {"prompts.late": "af_late"}, {"af_late": LATE})
    overrides = [*INLINE, "stages={reward: {function: 'my_reward:right', kind: reward}}"]
    done = asyncflow("run", write(), LATE_PROMPTS, *overrides, "loss={plugin: tabular_ppo_clip}")
    assert done.returncode == 2  # nobody writes advantages: still before the start
    assert "nothing was started" in done.stderr
    done = asyncflow("run", write(), *INLINE, LATE_PROMPTS, "stages.advantage={plugin: made_up}")
    assert done.returncode == 1
    assert "asyncflow: the run was ended, config: the judge's key is not set" in done.stderr
    assert "nothing was started" not in done.stderr
    assert "Traceback" not in done.stderr
    assert (folder / "runs" / "mine").is_dir()


def test_main_folder_of_runs_that_cannot_be_made_says_so(folder, write, capsys):
    (folder / "file").write_text("")
    path = write()
    status = main(["run", str(path), f"out={folder / 'file'}"])
    found = capsys.readouterr().err
    assert status == 2
    assert "nothing was started" in found
    assert f"out: the run's folder '{folder / 'file'}/mine' cannot be made: Not a dir" in found
    assert "Traceback" not in found


def test_main_usage_mistakes_end_with_status_2(capsys):
    for arguments in (["run"], ["doctor"], ["rnu", "x"], ["doctor", "x", "--yaml"]):
        assert main(arguments) == 2
        assert "Usage" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert main(["--version"]) == 0


def test_main_error_before_the_start_counts_its_faults(monkeypatch, capsys):
    def refuse(*_, **__):
        raise ConfigError(["one", "two"])

    monkeypatch.setattr("asyncflow_core.flow.flow.Flow.from_config", refuse)
    assert main(["run", "x"]) == 2
    assert capsys.readouterr().err == (
        "asyncflow: 2 fault(s), nothing was started:\n  one\n  two\n"
    )


def test_plugins_narrow_terminal_cuts_nothing_and_says_the_cause_whole(asyncflow, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    listed, loaded = asyncflow("plugins"), asyncflow("plugins", "--load")
    assert "\u2026" not in listed.stdout + loaded.stdout  # rich's ellipsis
    assert "rollout      broken" in loaded.stdout
    assert "\ntrainer.tabular: by default: loss_arrays=numpy, " in loaded.stdout
    assert "\nrollout.asks: depend on the options\n" in loaded.stdout
    assert "rollout plugin 'broken' of af-broken 1.0 failed on import of" in loaded.stdout
    assert "No module named 'this_module_is_not_there'" in loaded.stdout
    assert (listed.returncode, loaded.returncode) == (0, 1)


def test_help_is_whole_sentences(capsys):
    assert main(["--help"]) == 0
    commands = capsys.readouterr().out.partition("Commands:")[2]
    assert "..." not in commands
    assert all(line.endswith(".") for line in commands.strip().splitlines())


@pytest.mark.parametrize("columns", [40, 80])
def test_progress_on_a_terminal_never_wraps(columns, monkeypatch, capsys):
    part = {"plugin": "any"}
    config = RunConfig(
        **dict.fromkeys(("prompts", "rollout", "trainer", "loss"), part),
        stages={},
        workflow={"steps": 1000, "groups_per_step": 1, "group_size": 1},
    )
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = Progress(config)
    figures = {
        "flow/step_wall_s": 3600.0,
        "reward/mean": 0.5,
        "staleness/mean": 1.0,
        "flow/tokens_per_s": 1e6,
    }
    progress.step(StepResult(version=7, steps=1000, metrics=figures))
    line = capsys.readouterr().out.removeprefix("\r\x1b[K")
    assert len(line) < columns
    assert line.startswith("step    7/1000  reward 0.500")
    assert columns < 80 or "1:00:00 elapsed, 141:51:25 left" in line
