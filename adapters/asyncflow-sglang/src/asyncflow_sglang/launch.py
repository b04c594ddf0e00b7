"""Starting SGLang servers in an environment of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncflow_sglang import keeper
from asyncflow_sglang.options import SGLangOptions

__all__ = ["ServerProcess", "arguments", "environment", "free_port", "port_is_free"]

_LAST_LINES = 15

CPU_ARGS: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "mem_fraction_static": 0.5,
    "max_total_tokens": 65536,
    "skip_server_warmup": True,
    "sleep_on_idle": True,
}
"""What SGLang needs to run without a GPU, and not to keep a core busy while idle. It takes memory
that others use meanwhile for its own, so the fraction is large and the cache is bounded itself."""

CPU_ENV: Mapping[str, str] = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}


def arguments(options: SGLangOptions, port: int, *, label: str = "default") -> list[str]:
    """The command line of a server; the user's arguments win over ours.

    Args:
        options: of the rollout.
        port: where it listens.
        label: name of the weights it comes with.
    """
    chosen: dict[str, Any] = {
        "model_path": options.model,
        "host": "127.0.0.1",
        "port": port,
        "weight_version": label,
        "incremental_streaming_output": True,
    }
    if options.device == "cpu":
        chosen |= {"device": "cpu", **CPU_ARGS}
    chosen |= options.engine_args
    command = [options.python or sys.executable, "-m", "sglang.launch_server"]
    for name, value in chosen.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            command.append(flag)
        elif isinstance(value, list | tuple):
            command += [flag, *map(str, value)]
        elif isinstance(value, Mapping):
            command += [flag, json.dumps(value)]
        elif value is not False and value is not None:
            command += [flag, str(value)]
    return command


def environment(options: SGLangOptions) -> dict[str, str]:
    """Variables of a server: ours without what would change its interpreter or its log-probs."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SGLANG_RETURN_ORIGINAL_LOGPROB")
    }
    return {**inherited, **(CPU_ENV if options.device == "cpu" else {}), **options.env}


def free_port() -> int:
    """One that was free a moment ago; who loses the race for it is started again on another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def port_is_free(port: int) -> bool:
    """Whether nobody has it now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers bind it
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class ServerProcess:
    """One started server, behind its keeper."""

    def __init__(self, command: list[str], env: Mapping[str, str], log: Path) -> None:
        """Keep the arguments; `start` starts."""
        self._command = command
        self._env = dict(env)
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab") as log:  # noqa: ASYNC230 - opened once, at start
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", keeper.__file__, *self._command),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )

    @property
    def ended(self) -> str:
        """How it ended, with the last lines of its log; empty while it runs."""
        status = None if self._process is None else self._process.returncode
        if status is None:
            return ""
        return f"its process ended with status {status}; {self.last_lines()}"

    async def wait(self) -> None:
        """Wait for its end."""
        assert self._process is not None
        await self._process.wait()

    async def stop(self) -> None:
        """End it and all it started."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(10.0):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def last_lines(self) -> str:
        """Of its log."""
        try:
            with open(self._log, encoding="utf-8", errors="replace") as log:
                lines = deque((line[:300].rstrip() for line in log), maxlen=_LAST_LINES)
        except OSError as error:
            return f"its log cannot be read: {error}"
        return f"last lines of {self._log}:\n" + "\n".join(f"    {line}" for line in lines)
