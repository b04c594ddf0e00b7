"""Runs in processes of their own, as the integration tests start them, in places that can break."""

import asyncio
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from asyncflow_core.testing.aio import eventually
from tests.integration.conftest import Started, settings
from tests.workflow.faults import FAULTS, table

__all__ = ["settings"]

DOC = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"
LIMIT_S = 120.0
ROOT = os.geteuid() == 0

_STORE = "asyncflow_store_zmq.serve"


class Broken(Started):
    """A run to which things are done."""

    def __init__(self, tree, folder, *, network=False):
        self._tree = tree
        prefix = ("unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "-")
        super().__init__(tree, folder, prefix=prefix if network else ())

    def named(self, name):
        if name == "run":
            return psutil.Process(self.process.pid)
        if not name.startswith("store "):
            return super().named(name)
        role = name.removeprefix("store ")
        for process in self.processes():
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            if _STORE in command and role in command:
                return process
        return None

    @staticmethod
    async def pause(seconds):
        """What is tested is that nothing happens for so long."""
        await asyncio.sleep(seconds)

    def net(self, *command):
        subprocess.run(["nsenter", "-t", str(self.process.pid), "-n", "ip", *command], check=True)

    def fill_the_disk(self):
        full = self.folder.parent / "full"
        with contextlib.suppress(OSError), full.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    async def kill_at_random(self, names, times):
        for _ in range(times):
            await asyncio.sleep(random.uniform(0.1, 0.6))
            process = self.named(random.choice(names))
            if process is not None and self.process.poll() is None:
                process.kill()

    def said(self):
        """Everything the run and its processes said."""
        logs = self.folder / "logs"
        found = [path.read_text() for path in sorted(logs.glob("*"))] if logs.exists() else []
        return "\n".join([self.output, *found])

    async def says(self, words):
        """Wait until the run says this; the time it did."""
        return await self._heard(words, lambda: self.output)

    async def begins(self, words):
        """Wait until one of its processes says this; the time it did."""
        return await self._heard(words, self.said)

    async def _heard(self, words, said):
        await eventually(
            lambda: words in said() or self.process.poll() is not None, timeout_s=LIMIT_S
        )
        assert words in said(), self.output
        return time.monotonic()

    async def at_step(self, number=1):
        await eventually(
            lambda: self.steps() >= number or self.process.poll() is not None, timeout_s=LIMIT_S
        )
        assert self.process.poll() is None, self.output

    async def over(self, status):
        """Wait for its end; nothing of it is left."""
        await eventually(lambda: self.process.poll() is not None, timeout_s=LIMIT_S)
        assert self.process.returncode == status, self.output
        await eventually(lambda: not self.processes(), timeout_s=10)
        if status != -9:
            assert "Traceback" not in self.output

    async def completed_by_resume(self, steps):
        """`--resume` to so many steps more; what it leaves is as if nothing had happened."""
        (self.folder.parent / "full").unlink(missing_ok=True)
        folder, tree = self.folder, json.loads(self.config.read_text())
        total = self.steps() + steps  # of whole lines and, on a full disk, of a torn one
        resumed = Resumed(self, [f"workflow.steps={total}"])
        await eventually(lambda: resumed.process.poll() is not None, timeout_s=LIMIT_S)
        assert resumed.process.returncode == 0, resumed.output
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [step["version"] for step in metrics] == list(range(1, total + 1))
        rows = tree["workflow"]["groups_per_step"] * tree["workflow"]["group_size"]
        trained = [row for row in self.samples() if row["batch"] is not None]
        assert len({row["key"] for row in trained}) == len(trained) == total * rows
        for batch in range(total):
            assert sum(row["batch"] == batch for row in trained) == rows


class Resumed:
    """`asyncflow run --resume` of a run that ended."""

    def __init__(self, run, overrides):
        self.output_path = run.output_path.with_suffix(".resumed")
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "asyncflow_core.cli", "run"),
                    *("--resume", str(run.folder), *overrides),
                ],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=run.environment,
            )

    @property
    def output(self):
        return self.output_path.read_text()


@pytest.fixture
def broken(settings, tmp_path):
    """A function that starts a run in a place; whatever is left at the end is killed."""
    runs, disks = [], []

    def start(place="", **changes):
        if place and not (ROOT and shutil.which("unshare") and shutil.which("ip")):
            pytest.skip("making networks and disks takes root, unshare and ip")
        if place == "disk":
            disk = tmp_path / "disk"
            disk.mkdir()
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True
            )
            disks.append(disk)
            changes["out"] = str(disk)
        runs.append(Broken(settings(**changes), tmp_path, network=place == "network"))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
    for disk in disks:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture(scope="session")
def noticed():
    """Fault to seconds until it was noticed; written into the document if WRITE_TABLE is set."""
    rows = {}
    yield rows
    if os.environ.get("WRITE_TABLE"):
        missing = [fault.name for fault in FAULTS if fault.name not in rows]
        assert not missing, f"the table is left as it was; not tested or failed: {missing}"
        before, rest = DOC.read_text().split(BEGIN)
        after = rest.split(END)[1]
        DOC.write_text(f"{before}{BEGIN}{table(rows)}{END}{after}")
