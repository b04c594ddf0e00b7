"""How a command names a run: by its folder, or by its name below `runs/`."""

from __future__ import annotations

from pathlib import Path

from asyncflow_core.errors import ConfigError

__all__ = ["find_run"]


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
