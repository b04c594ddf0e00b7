"""`asyncflow init | doctor | run | plan | top | report | plugins | serve | keys` and others."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

from asyncflow_core import __version__
from asyncflow_core.cli.output import forget_output, output_is_gone, ready_streams, say
from asyncflow_core.errors import AsyncFlowError, ConfigError

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="asyncflow")
def cli() -> None:
    """Async RL post-training whose core knows no engine."""


@cli.command()
@click.argument("directory", type=click.Path(), default=".", metavar="[DIR]")
@click.option("--model", metavar="PATH", help="A Hugging Face model directory to train.")
def init(directory: str, model: str | None) -> None:
    """Write a small job into DIR.

    DIR is the current folder unless it is given. The job is a commented config.yaml, a reward.py
    and a prompts.jsonl. It runs at once with asyncflow-core alone, and learns within seconds. With
    --model it trains that model, by the trainer hzp and rollout on transformers. No file is
    overwritten.
    """
    from asyncflow_core.cli.init import init as write

    write(directory, model=model)


@cli.command()
@click.argument("config", type=click.Path(), required=False)
@click.argument("overrides", nargs=-1)
@click.option("--resume", metavar="RUN", help="Go on with RUN, by its name or its folder.")
def run(config: str | None, overrides: Sequence[str], resume: str | None) -> None:
    """Train: run CONFIG with OVERRIDES.

    CONFIG is a YAML file; an override is section.key=value, as in workflow.steps=10.
    With --resume there is no CONFIG: the run has its own. RUN is its folder, or its name below
    runs/.
    """
    from asyncflow_core.cli.progress import Progress
    from asyncflow_core.cli.runs import find_run, how_to_go_on
    from asyncflow_core.config_source import parse_overrides
    from asyncflow_core.flow.flow import Flow

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    _end_as_by_ctrl_c()
    if resume is not None:  # the first argument is an override then
        if config is not None and "=" not in config:
            raise click.UsageError(
                f"--resume goes on with a run by its own configuration; leave CONFIG {config!r} "
                f"out, and give what is to change as section.key=value"
            )
        flow = Flow.resume(
            find_run(resume), parse_overrides([config, *overrides] if config else [])
        )
    elif config is not None:
        flow = Flow.from_config(config, parse_overrides(overrides))
    else:
        raise click.UsageError("run takes CONFIG, or --resume RUN")
    progress = Progress(flow.config, first=flow.resumed_from)
    try:
        for step in flow.run(on_start=lambda: progress.starting(flow.moved_to)):
            progress.step(step)
    except (Exception, KeyboardInterrupt) as error:
        if not flow.started:
            raise
        failure = _StartedError(error) if isinstance(error, ConfigError) else error
        for line in how_to_go_on(flow.folder):
            failure.add_note(line)
        raise failure from error.__cause__
    finally:
        progress.close()
    progress.finished(flow.summary, flow.folder)


@cli.command()
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable report.")
def doctor(config: str, overrides: Sequence[str], as_json: bool) -> None:
    """Check CONFIG and start nothing.

    Shows its plugins and dataflow, or every fault at once; OVERRIDES are those of run.
    """
    from asyncflow_core.cli.doctor import examine

    sys.exit(examine(config, overrides, as_json=as_json))


@cli.command()
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option(
    "--profile",
    "profiles",
    metavar="RUN",
    multiple=True,
    help="A finished run to take times from, by its name or its folder; several add up.",
)
@click.option("--times", type=click.Path(), help="YAML of times by hand, over those of profiles.")
@click.option(
    "--devices",
    type=click.IntRange(min=2),
    help="Devices to share out; default: as many as CONFIG takes.",
)
@click.option("--trainer-ranks", metavar="N,N", help="Ranks to try; default: powers of two.")
@click.option(
    "--stage-workers",
    metavar="STAGE=N,N",
    multiple=True,
    help="Workers of a stage to try; default: those of CONFIG.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Steps to measure in each simulation.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def plan(
    config: str,
    overrides: Sequence[str],
    profiles: Sequence[str],
    times: str | None,
    devices: int | None,
    trainer_ranks: str | None,
    stage_workers: Sequence[str],
    steps: int | None,
    as_json: bool,
) -> None:
    """Say how many replicas and trainer ranks CONFIG should have.

    Simulates the run for every number of them that may be fastest within --devices, with what work
    took in the runs of --profile or is said to take in --times. OVERRIDES are those of run, as in
    workflow.preset=streaming. Starts nothing.
    """
    from asyncflow_core.cli.plan import Asked
    from asyncflow_core.cli.plan import plan as make

    asked = Asked(profiles, times, devices, trainer_ranks, stage_workers, steps)
    sys.exit(make(config, overrides, asked, as_json=as_json))


@cli.command()
@click.option("--load", is_flag=True, help="Import each plugin and show its capabilities.")
def plugins(load: bool) -> None:
    """List installed plugins."""
    from asyncflow_core.cli.plugins import show_plugins

    sys.exit(show_plugins(load=load))


@cli.command("new-plugin")
@click.argument("kind")
@click.argument("name")
@click.option("--out", metavar="DIR", help="Folder of the package; else asyncflow-KIND-NAME, here.")
def new_plugin(kind: str, name: str, out: str | None) -> None:
    """Write a pip package that offers the plugin KIND.NAME.

    KIND is data_store, rollout, trainer, weight_sync, launcher, tokenizer, prompts, stage, loss or
    lease_policy; NAME is lower-case, as my_engine. What it writes works, passes its own test and
    says where an engine's calls go. Nothing is overwritten.
    """
    from asyncflow_core.cli.new_plugin import new_plugin as write

    write(kind, name, out)


@cli.command("check-plugin")
@click.argument("plugin", metavar="KIND.NAME")
@click.option(
    "--options", metavar="YAML_OR_FILE", help="Options of the plugin: '{a: 1}' or a file."
)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="Longest one test may take.",
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable report.")
def check_plugin(plugin: str, options: str | None, timeout_s: float, as_json: bool) -> None:
    """Hold an installed plugin against the contract of its kind.

    Looks at what it registers; then runs the conformance kit of a data store, rollout, trainer or
    weight sync, clause by clause, or uses what another kind makes. Exit status 1 tells that
    something does not hold, 2 that it could not be checked, or not all of it.
    """
    from asyncflow_core.cli.check_plugin import check_plugin as check

    _end_as_by_ctrl_c()
    sys.exit(check(plugin, options, timeout_s=timeout_s, as_json=as_json))


@cli.command()
@click.argument("kind", required=False)
@click.argument("plugin", required=False)
@click.argument("options", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--bind", help="Address to answer at: ipc://PATH or tcp://HOST:PORT.")
@click.option("--keys", type=click.Path(), help="Key pair of this server, to encrypt connections.")
@click.option("--allow", type=click.Path(), help="File of the public keys of clients to let in.")
@click.option("--spec", hidden=True, help="Name of a run's process; its spec is standard input.")
def serve(
    kind: str | None,
    plugin: str | None,
    options: Sequence[str],
    bind: str | None,
    keys: str | None,
    allow: str | None,
    spec: str | None,
) -> None:
    """Serve one service until stopped.

    KIND is rollout, trainer, weight_sync or data_store; KEY=VALUE are the plugin's options.
    The environment variable ASYNCFLOW_TOKEN holds the secret that clients show; without it one is
    made and printed. An address beyond this machine takes --keys (see `asyncflow keys new`) and
    --allow.
    """
    if spec is not None:
        from asyncflow_core.flow.processes.serve import serve_from_stdin

        sys.exit(serve_from_stdin())
    if not (kind and plugin and bind):
        raise click.UsageError("serve takes KIND, PLUGIN and --bind ADDRESS")
    from asyncflow_core.cli.serve import serve_by_hand

    _end_as_by_ctrl_c()
    sys.exit(serve_by_hand(kind, plugin, options, bind, keys=keys, allow=allow))


@cli.group()
def keys() -> None:
    """Make and show the keys of connections beyond this machine."""


@keys.command("new")
@click.argument("file", type=click.Path())
def keys_new(file: str) -> None:
    """Write a new key pair to FILE and print its public key."""
    from asyncflow_core.cli.keys import new_keys

    new_keys(file)


@keys.command("show")
@click.argument("file", type=click.Path())
def keys_show(file: str) -> None:
    """Print the public key of the pair in FILE."""
    from asyncflow_core.cli.keys import show_keys

    show_keys(file)


@cli.command()
@click.argument("run")
@click.option("--once", is_flag=True, help="Print once instead of refreshing.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable status, once.")
def top(run: str, once: bool, as_json: bool) -> None:
    """Show what RUN does now.

    RUN is its folder, or its name below runs/. Shows queues, staleness, how busy each worker is,
    tokens wasted, who waits for whom, the bottleneck and which setting would help. Exit status 1
    tells that the run failed, or was killed.
    """
    from asyncflow_core.cli.top import top as show

    sys.exit(show(run, once=once, as_json=as_json))


@cli.command()
@click.argument("run")
@click.option("--out", metavar="FILE", help="Write it as one HTML file with curves, too.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable report.")
def report(run: str, out: str | None, as_json: bool) -> None:
    """Tell what happened in RUN.

    RUN is its folder, or its name below runs/; it may be going on, finished or failed. Says what it
    learned, where time went, what was stale, wasted or dropped, and shows some responses. Exit
    status 1 tells that the run failed.
    """
    from asyncflow_core.cli.report.command import report as show

    sys.exit(show(run, out=out, as_json=as_json))


class _StartedError(Exception):
    """A `ConfigError` that only showed when the run had started."""


def _failed(error: Exception, *, starts: bool) -> int:
    """Say why; the exit status. `starts`: the command starts something when nothing is wrong."""
    if isinstance(error, ConfigError):
        nothing = ", nothing was started" if starts else ""
        say("\n  ".join([f"asyncflow: {len(error.faults)} fault(s){nothing}:", *error.faults]))
        return 2
    if isinstance(error, AsyncFlowError):
        say(f"asyncflow: {error.code}: {error}")
    elif isinstance(error, _StartedError):
        say(f"asyncflow: the run was ended, config: {error}")
    elif isinstance(error, OSError) and output_is_gone():
        return _output_failed(error)
    else:
        raise error
    return 1


def _output_failed(error: OSError) -> int:
    forget_output()
    say(f"asyncflow: what it prints cannot be written: {error.strerror}")
    return 1


def _say_notes(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        say(f"asyncflow: {note}")


def _end_as_by_ctrl_c() -> None:
    """SIGTERM and the end of the terminal (SIGHUP) take every process and file along, too.

    Under nohup SIGHUP is ignored, and stays so.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    0: done. 1: the run failed. 2: what was asked for is wrong, nothing was started. 130: ended by
    Ctrl-C.
    """
    ready_streams()
    try:
        here = os.getcwd()
    except FileNotFoundError:
        say("asyncflow: the folder where it is started was deleted; go to one that is there")
        return 2
    if here not in sys.path and "" not in sys.path:
        # Functions by module:name are found where the command is started, as with `python -m`.
        sys.path.insert(0, here)
    status = _run(arguments)
    try:
        sys.stdout.flush()
    except OSError as error:  # the last of it; the interpreter would end with 120
        failed = _output_failed(error)
        return status or failed
    return status


def _run(arguments: Sequence[str] | None) -> int:
    command = next(iter(sys.argv[1:] if arguments is None else arguments), "")
    try:
        cli.main(args=arguments, prog_name="asyncflow", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt) as error:
        ended = "; every process of the run was ended" if command == "run" else ""
        say(f"asyncflow: interrupted{ended}")
        _say_notes(error.__cause__ or error)  # click puts its own in front
        return 130
    except (AsyncFlowError, _StartedError, OSError) as error:
        status = _failed(error, starts=command in ("run", "serve"))
        _say_notes(error)
        return status
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0
