"""A file system in memory that is full: who writes is told so, and who reads too late lives on."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.multiproc

MOUNT = 'mount -t tmpfs -o size=24m none "$1" && shift && exec "$@"'
SCRIPT = """
import sys
from pathlib import Path
from asyncflow_core.errors import BackpressureError
from asyncflow_store_zmq.arena import UNIT, Arena

shard = Arena(Path(sys.argv[1]) / "shard-0.arena", create=True)
start = UNIT
try:
    while True:
        shard.reserve(start, UNIT)
        shard.data[start : start + UNIT] = 1
        start += UNIT
except BackpressureError as error:
    print(error)
reader = Arena(shard.path)
first = 2 * UNIT
shard.punch(first, 4 * UNIT)  # of dropped rows
try:
    while True:  # others take what came free
        shard.reserve(start, UNIT)
        start += UNIT
except BackpressureError:
    pass
assert not reader.holds(first, 1, 0)
assert not reader.data[first : first + 4 * UNIT].any()
assert reader.data[UNIT : 2 * UNIT].all()
print("alive")
"""


def test_full_memory_is_said_and_a_reader_of_dropped_rows_is_not_killed(tmp_path):
    command = ["unshare", "-Urm", "sh", "-c", MOUNT, "sh", str(tmp_path)]
    try:
        able = subprocess.run([*command, "true"], capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if able.returncode:
        pytest.skip("a user may mount nothing here")
    python = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    run = subprocess.run([*command, *python], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "no memory for 1048576 bytes" in run.stdout
    assert "alive" in run.stdout
