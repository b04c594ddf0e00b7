import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from sglang_helpers import make_options, save_model

from asyncflow_sglang import keeper
from asyncflow_sglang.launch import arguments, environment, free_port


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


class RealServer:
    """SGLang as its makers publish it, on this machine's CPU."""

    def __init__(self, model, log, **options):
        self.model = str(model)
        self.log = log
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._options = make_options(model, **options)
        self.start()

    def start(self):
        command = [sys.executable, "-I", "-S", keeper.__file__]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, *arguments(self._options, self._port)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment(self._options),
            )

    @property
    def tree(self):
        """Its processes, without the keeper."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self):
        """By kill -9, at once."""
        processes = self.tree
        for process in processes:
            process.kill()
        self.process.wait()
        self.process.stdin.close()

    def call(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=120) as reply:
            text = reply.read()
        return json.loads(text) if text.startswith((b"{", b"[")) else text

    def wait(self, timeout_s=600.0):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.call("/model_info")
                return self
            time.sleep(0.2)
        raise AssertionError(f"no server came up:\n{self.log.read_text()[-3000:]}")

    def reset(self):
        """The weights and name it came with, nothing running, nothing paused, full speed."""
        self.call("/continue_generation", {})
        self.call("/abort_request", {"abort_all": True})
        self.call("/slow_down", {"forward_sleep_time": None})
        self.call("/pause_generation", {"mode": "retract"})
        loaded = {"model_path": self.model, "weight_version": "default"}
        self.call("/update_weights_from_disk", loaded)
        self.call("/continue_generation", {})

    def slow_down(self, seconds):
        self.call("/slow_down", {"forward_sleep_time": seconds})

    def stop(self, *, kill=False):
        """By closing its lifeline, or by a kill -9 of its keeper: nothing is left either way."""
        processes = self.tree if self.process.poll() is None else []
        if kill:
            self.process.kill()
        self.process.stdin.close()
        self.process.wait()
        _, left = psutil.wait_procs(processes, timeout=60)
        assert not left


@contextlib.contextmanager
def started(*servers):
    """They are up in the block, and gone after it."""
    try:
        yield [server.wait() for server in servers]
    finally:
        for number, server in enumerate(servers):
            server.stop(kill=number > 0)


@pytest.fixture(scope="session")
def running_servers(model, tmp_path_factory):
    """Two servers, started side by side."""
    logs = tmp_path_factory.mktemp("logs")
    with started(*(RealServer(model, logs / f"{n}.log") for n in range(2))) as servers:
        yield servers


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory):
    """A server on two tensor parallel ranks."""
    log = tmp_path_factory.mktemp("logs") / "ranks.log"
    chosen = {"engine_args": {"tp_size": 2}, "env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
    with started(RealServer(model, log, **chosen)) as (server,):
        yield server


@pytest.fixture
def servers(running_servers):
    for server in running_servers:
        server.reset()
    return running_servers


@pytest.fixture
def server(running_servers):
    running_servers[0].reset()
    return running_servers[0]
