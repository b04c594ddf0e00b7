"""What a run leaves behind: metrics, samples, a summary, in `runs/<name>/`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import Batch, GroupKey, Key
from asyncflow_core.config import RunConfig
from asyncflow_core.config_source import dump_yaml
from asyncflow_core.errors import ConfigError, DataError, ServiceError
from asyncflow_core.parts import Tokenizer
from asyncflow_core.services.data_store import RowInfo

__all__ = ["Recorder", "Rewards", "RunFolder"]


class RunFolder:
    """`runs/<name>/`: created fresh; what an earlier run of the name left is moved aside."""

    def __init__(self, config: RunConfig) -> None:
        """Create the folder and write `config.yaml` and `environment.json`.

        Raises:
            ConfigError: the folder cannot be made.
        """
        self.path = (Path(config.out) / config.name).resolve()
        self._files: dict[str, TextIO] = {}
        self._lock = -1
        try:
            self._make()
            (self.path / "config.yaml").write_text(
                dump_yaml(config.model_dump(mode="json")), encoding="utf-8"
            )
            self._write_json("environment.json", _environment())
        except OSError as error:
            self.close()
            raise ConfigError(
                f"out: the run's folder {str(self.path)!r} cannot be made: {error.strerror}"
            ) from error

    def _make(self) -> None:
        """Make and lock it, while no other run of `out` does.

        Raises:
            ConfigError: a run that is going on has it.
        """
        with contextlib.suppress(FileExistsError):  # a file: the folder below says it better
            self.path.parent.mkdir(parents=True, exist_ok=True)
        others = _locked(self.path.parent, wait=True)
        try:
            found = _locked(self.path)
            if found is None:
                raise ConfigError(
                    f"name: a run is going on in {str(self.path)!r}; give this one another name"
                )
            os.close(found)
            self.moved_to = _move_aside(self.path)
            (self.path / "logs").mkdir(parents=True)
            lock = _locked(self.path)
            self._lock = -1 if lock is None else lock
        finally:
            if others is not None:
                os.close(others)

    def log_path(self, service: str) -> str:
        """Where a service's output goes."""
        return str(self.path / "logs" / f"{service}.log")

    def append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Add lines of JSON to a file.

        Raises:
            ServiceError: it cannot be written.
        """
        with self._writing(name):
            if name not in self._files:
                self._files[name] = open(self.path / name, "a", encoding="utf-8")  # noqa: SIM115
            self._files[name].write("".join(f"{json.dumps(record)}\n" for record in records))
            self._files[name].flush()

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write one JSON file, whole or not at all.

        Raises:
            ServiceError: it cannot be written.
        """
        with self._writing(name):
            self._write_json(name, value)

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        temporary.replace(self.path / name)

    def close(self) -> None:
        """Close what `append` opened; another run may then take the name."""
        for file in list(self._files.values()):
            with contextlib.suppress(OSError):  # lines of an `append` that failed
                file.close()
        self._files.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ServiceError(
                f"{str(self.path / name)!r} cannot be written: {error.strerror}", service="recorder"
            ) from error


def _locked(path: Path, *, wait: bool = False) -> int | None:
    """A descriptor that holds the lock on `path`; None if another process has it.

    A path that is not there, or on a file system without locks, is not locked by anybody.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        pass
    return fd


def _move_aside(path: Path) -> Path | None:
    if not path.exists():
        return None
    number = 1
    while (aside := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def _environment() -> dict[str, Any]:
    packages = {dist.name: dist.version for dist in metadata.distributions()}
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": dict(sorted(packages.items())),
    }


@dataclass(slots=True)
class Rewards:
    """Rewards of one batch or one evaluation; `seen` has the rows they are of."""

    seen: set[Key] = field(default_factory=set)
    values: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: int = 0
    last_error: str = ""


class Recorder:
    """Sees every rewarded row, training and evaluation; writes it down and counts it, once.

    Evaluation rows are told apart by having no batch; the epoch of their key numbers evaluations.

    Concurrency: rows are made readable and written on a thread, for long ones take their time.
    """

    def __init__(self, folder: RunFolder, tokenizer: Tokenizer | None, thread: Executor) -> None:
        """Write samples into `folder`; texts only where there is a tokenizer."""
        self._folder = folder
        self._tokenizer = tokenizer
        self._thread = thread
        self._changed = asyncio.Event()
        self.batches: defaultdict[int, Rewards] = defaultdict(Rewards)
        self.evaluations: defaultdict[int, Rewards] = defaultdict(Rewards)

    async def observe(self, rows: Sequence[RowInfo], batch: Batch) -> None:
        """Take rewarded rows; those that were seen before, under a lease that was lost, are not."""
        new = [at for at, info in enumerate(rows) if info.key not in self._rewards(info).seen]
        rows, batch = [rows[at] for at in new], batch.take(new)
        for info in rows:
            self._rewards(info).seen.add(info.key)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write, rows, batch)
        for info, reward, tokens, error in zip(
            rows,
            batch["reward"].array.tolist(),
            batch["response_ids"].lengths.tolist(),
            _errors(batch),
            strict=True,
        ):
            self._count(info, reward, tokens, error)
        self._changed.set()

    def _write(self, rows: Sequence[RowInfo], batch: Batch) -> None:
        prompts: dict[GroupKey, Any] = {}  # shared by a group, so decoded once
        records = []
        for info, prompt, response, reward, versions, reason, error in zip(
            rows,
            batch["prompt_ids"],
            batch["response_ids"],
            batch["reward"].array.tolist(),
            batch["versions"],
            batch["finish_reason"],
            _errors(batch),
            strict=True,
        ):
            if info.key.group not in prompts:
                prompts[info.key.group] = self._readable(prompt, info.key)
            record = {
                "key": str(info.key),
                "batch": info.batch,
                "prompt": prompts[info.key.group],
                "response": self._readable(response, info.key),
                "reward": reward,
                "versions": versions.tolist(),
                "finish_reason": reason,
            }
            records.append(record if error is None else {**record, "reward_error": error})
        self._folder.append("samples.jsonl", records)

    def _rewards(self, info: RowInfo) -> Rewards:
        if info.batch is None:
            return self.evaluations[info.key.epoch]
        return self.batches[info.batch]

    def _count(self, info: RowInfo, reward: float, tokens: int, error: str | None) -> None:
        rewards = self._rewards(info)
        rewards.values.append(reward)
        rewards.tokens += tokens
        if error is not None:
            rewards.errors += 1
            rewards.last_error = error

    def _readable(self, ids: NDArray[np.int32], key: Key) -> Any:
        if self._tokenizer is None:
            return ids.tolist()
        try:
            return self._tokenizer.decode(ids)
        except Exception as error:
            raise DataError(
                f"row {key}: the tokenizer cannot decode {ids.tolist()}: {error}"
            ) from error

    async def wait_batch(self, batch: int, rows: int) -> Rewards:
        """The rewards of a batch, once `rows` of it were seen; it is then forgotten."""
        await self._wait(self.batches, batch, rows)
        return self.batches.pop(batch)

    async def wait_evaluation(self, epoch: int, rows: int) -> Rewards:
        """The rewards of an evaluation, once `rows` of it were seen; it is then forgotten."""
        await self._wait(self.evaluations, epoch, rows)
        return self.evaluations.pop(epoch)

    async def _wait(self, found: defaultdict[int, Rewards], number: int, rows: int) -> None:
        while len(found[number].values) < rows:
            self._changed.clear()
            await self._changed.wait()


def _errors(batch: Batch) -> Iterable[str | None]:
    return batch["reward_error"] if "reward_error" in batch else [None] * batch.rows
