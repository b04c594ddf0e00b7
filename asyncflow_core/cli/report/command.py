"""The command: reads, prints, writes the page."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

from asyncflow_core.cli.report.facts import make_report
from asyncflow_core.cli.report.page import MARK, page
from asyncflow_core.cli.report.reading import read_run
from asyncflow_core.cli.report.text import lines
from asyncflow_core.cli.runs import find_run
from asyncflow_core.errors import ConfigError

__all__ = ["report"]


def report(run: str, *, out: str | None, as_json: bool) -> int:
    """Print a report; returns the exit status, 1 if the run failed.

    Args:
        run: its folder, or its name below `runs/`.
        out: HTML file to write, too. An earlier report is replaced, nothing else is.
        as_json: print the record instead of text.

    Raises:
        ConfigError: there is no such run, or `out` cannot be written.
    """
    folder = find_run(run)
    if out is not None:
        _check(Path(out))
    files = read_run(folder)
    found = make_report(files, now=time.time())
    if out is not None:
        _write(Path(out), page(found, files))
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        print("\n".join(lines(found)))
        if out is not None:
            print(f"\nwritten: {out}")
    return int(found.state == "failed")


def _check(out: Path) -> None:
    try:
        if not out.exists():
            return
        if out.is_file():
            with out.open("rb") as file:
                if file.read(len(MARK)) == MARK.encode():
                    return
    except OSError as error:
        raise _not_written(out, error) from error
    raise ConfigError(
        f"--out: {str(out)!r} is there and is no report; it is not overwritten, name a new file"
    )


def _write(out: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        try:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _not_written(out, error) from error


def _not_written(out: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--out: {str(out)!r} cannot be written: {error.strerror}; name a file in a folder that is "
        f"there"
    )
