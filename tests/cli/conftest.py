"""Generated packages, installed without pip: a dist-info beside their sources."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncflow_core.cli.main import main
from asyncflow_core.cli.new_plugin import package_files

COMMAND = Path(sys.executable).with_name("asyncflow")


@dataclass
class Done:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def report(self):
        return json.loads(self.out)


class Site:
    """A folder of installed distributions, and the command as a user of it starts it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.paths = [folder]

    def install(self, name, points, modules=()):
        """A distribution as pip leaves it behind; `modules` are sources by their name."""
        info = self.folder / f"{name.replace('-', '_')}-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        lines = "".join(f"{label} = {module}\n" for label, module in points.items())
        (info / "entry_points.txt").write_text(f"[asyncflow]\n{lines}")
        for module, source in dict(modules).items():
            (self.folder / f"{module}.py").write_text(source)

    def generate(self, kind, name, into):
        """A new package under `into`, installed."""
        for path, text in package_files(kind, name).items():
            file = into / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        package = f"asyncflow_{kind}_{name}"
        self.install(package.replace("_", "-"), {f"{kind}.{name}": f"{package}.plugin"})
        self.paths.append(into / "src")
        return into

    def run(self, *command, cwd=None, timeout=120):
        """Run a command where all of it is installed."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("ASYNCFLOW")}
        path = [*map(str, self.paths), inherited.get("PYTHONPATH", "")]
        done = subprocess.run(
            [*map(str, command)],
            cwd=cwd or self.folder,
            env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    return Site(folder)


@pytest.fixture
def check(site, capsys, monkeypatch):
    """`asyncflow check-plugin ... --json`, in this process; a kit runs in one of its own anyway."""
    modules = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def call(*arguments):
        for path in site.paths:
            monkeypatch.syspath_prepend(str(path))
        path = [*map(str, site.paths), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        status = main(["check-plugin", *map(str, arguments), "--json"])
        return Done(status, *capsys.readouterr())

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)
    for name in set(sys.modules) - modules:
        if any(part in name for part in ("af_", "asyncflow_echo", "_made", "vllm")):
            del sys.modules[name]
