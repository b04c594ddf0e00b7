"""`asyncflow init`: a small job to begin with."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import string
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path

from asyncflow_core.errors import ConfigError

__all__ = ["init", "job"]

_JOBS = files("asyncflow_core.cli._jobs")
_WORDS, _SUMS = 400, 600
_LETTERS = string.ascii_lowercase


def init(directory: str, *, model: str | None) -> None:
    """Write a job and say how to go on.

    Args:
        directory: where; made if it is not there.
        model: Hugging Face model directory to train; None for a job that core alone runs.

    Raises:
        ConfigError: a file is in the way, or cannot be written; nothing was written.
    """
    folder = Path(directory)
    texts = job(None if model is None else _seen_from(folder, Path(model).expanduser()))
    _write(folder, texts)
    print(f"wrote {', '.join(str(folder / name) for name in texts)}")
    if model is not None and not Path(model).expanduser().is_dir():
        print(f"there is no model in {model} yet: put one there, or change `model` in config.yaml")
    print("go on with:")
    if folder.resolve() != Path.cwd():  # reward.py is found where a command is started
        print(f"  cd {shlex.quote(str(folder))}")
    print("  asyncflow doctor config.yaml")
    print("  asyncflow run config.yaml")


def job(model: str | None) -> Mapping[str, str]:
    """Names and texts of a job's files.

    Args:
        model: what the configuration has for `model`; None for the job without one.
    """
    name, prompts = ("tabular", _words()) if model is None else ("hzp", _sums())
    config = _JOBS.joinpath(f"{name}.yaml").read_text("utf-8")
    return {
        # JSON's strings are YAML's, whatever a path is made of.
        "config.yaml": config.replace("model: MODEL", f"model: {json.dumps(model)}"),
        "reward.py": _JOBS.joinpath(f"{name}_reward.py").read_text("utf-8"),
        "prompts.jsonl": "".join(f"{json.dumps(line)}\n" for line in prompts),
    }


def _words() -> Iterator[dict[str, str]]:
    """Made-up words, and the letter after their last one."""
    draw = random.Random(0)  # noqa: S311 - no secret is made
    words = dict.fromkeys("".join(draw.choices(_LETTERS, k=3)) for _ in range(_WORDS))
    for word in words:
        yield {"prompt": word, "answer": _LETTERS[(_LETTERS.index(word[-1]) + 1) % len(_LETTERS)]}


def _sums() -> Iterator[dict[str, str]]:
    draw = random.Random(0)  # noqa: S311 - no secret is made
    for a, b in dict.fromkeys((draw.randrange(100), draw.randrange(100)) for _ in range(_SUMS)):
        yield {"prompt": f"What is {a} + {b}? End with the number.", "answer": str(a + b)}


def _seen_from(folder: Path, model: Path) -> str:
    """A configuration's paths are relative to its folder."""
    if model.is_absolute():
        return str(model)
    return os.path.relpath(model.resolve(), folder.resolve())


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    """All files, or none."""
    if there := [name for name in texts if os.path.lexists(folder / name)]:
        raise ConfigError(
            f"init: {', '.join(str(folder / name) for name in there)} "
            f"{'is' if len(there) == 1 else 'are'} in the way and nothing is overwritten; name "
            f"another folder, as in `asyncflow init my-job`, or move them"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            for name, text in texts.items():
                with (folder / name).open("x", encoding="utf-8") as file:
                    undo.callback((folder / name).unlink, missing_ok=True)
                    file.write(text)
            undo.pop_all()
    except OSError as error:
        raise ConfigError(
            f"init: {str(error.filename or folder)!r} cannot be written: {error.strerror}; name "
            f"another folder"
        ) from error
