"""How a command names a run: by its folder, or by its name below `runs/`."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

from asyncflow_core.errors import ConfigError
from asyncflow_core.flow.running.resume import resumable

__all__ = ["find_run", "how_to_go_on", "shown"]


def find_run(run: str, *, file: str = "environment.json") -> Path:
    """The folder of a run.

    Args:
        run: its folder, or its name below `runs/`.
        file: what is in the folder of every run that the command can work on.

    Raises:
        ConfigError: there is none.
    """
    for folder in (Path(run), Path("runs") / run):
        if (folder / file).is_file():
            return folder
    raise ConfigError(
        f"there is no run {run!r}: neither {run}/{file} nor runs/{run}/{file} is there; give the "
        f"run's folder or its name, from the folder where it was started"
    )


def shown(folder: Path) -> Path:
    """A folder as a user types it."""
    try:
        return folder.relative_to(Path.cwd())
    except (ValueError, FileNotFoundError):  # it is not below; or that was deleted meanwhile
        return folder


def how_to_go_on(folder: Path) -> Iterator[str]:
    """What to type to go on with a run that ended early; nothing where it has no checkpoint."""
    with contextlib.suppress(ConfigError, OSError):
        step = resumable(folder)
        yield f"`asyncflow run --resume {shlex.quote(str(shown(folder)))}` goes on from step {step}"
