import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

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
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        chosen = make_options(model, **options)
        command = [sys.executable, "-I", "-S", keeper.__file__, *arguments(chosen, port)]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment(chosen),
            )
        self.log = log

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

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture(scope="session")
def running_servers(model, tmp_path_factory):
    """Two servers, started side by side."""
    logs = tmp_path_factory.mktemp("logs")
    servers = [RealServer(model, logs / f"{n}.log") for n in range(2)]
    try:
        yield [server.wait() for server in servers]
    finally:
        for server in servers:
            server.stop()


@pytest.fixture
def servers(running_servers):
    for server in running_servers:
        server.reset()
    return running_servers


@pytest.fixture
def server(running_servers):
    running_servers[0].reset()
    return running_servers[0]
