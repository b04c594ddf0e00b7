"""Two real processes, a killed publisher, a full file system."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest

from asyncflow_core.parts import PartContext
from asyncflow_core.testing.aio import stream
from asyncflow_core.testing.weight_sync import random_buckets
from asyncflow_weights_host.options import HostOptions
from asyncflow_weights_host.service import HostWeightSync

pytestmark = pytest.mark.multiproc

COMMON = """
import asyncio, json, sys
from pathlib import Path
import numpy as np
from asyncflow_core.parts import PartContext
from asyncflow_core.services.weight_sync import *
from asyncflow_core.services.weight_sync import Bucket, PublishedWeights, WeightManifest
from asyncflow_weights_host.options import HostOptions
from asyncflow_weights_host.service import HostWeightSync

def host(root):
    return HostWeightSync(HostOptions(), PartContext("child", run_dir=Path(root)))
"""

READER = (
    COMMON
    + """
async def main():
    root, text = sys.argv[1:]
    data = json.loads(text)
    tensors = tuple(
        TensorSpec(t["name"], t["dtype"], tuple(t["shape"]), t["offset"], tuple(t["aliases"]))
        for t in data["manifest"].pop("tensors")
    )
    manifest = WeightManifest(tensors=tensors, **data.pop("manifest"))
    published = PublishedWeights(manifest, data["transport"], data["locator"])
    async with host(root) as replica:
        await replica.attach("rollout-0", published)
        checksum = Checksum()
        async for bucket in (await replica.fetch(published)).buckets:
            for spec in bucket.specs:
                checksum.add(spec.name, spec.dtype, spec.shape, bucket.tensor_bytes(spec))
                print(spec.name, flush=True)
        print(checksum.hexdigest())

asyncio.run(main())
"""
)

PUBLISHER = (
    COMMON
    + """
from dataclasses import asdict

async def buckets(half_way=None):
    for name in "ab":
        yield Bucket((TensorSpec(name, "U8", (100000,)),), np.ones(100000, np.uint8))
        if half_way:
            print(json.dumps(asdict(await half_way)), flush=True)
            await asyncio.sleep(600)

async def main():
    async with host(sys.argv[1]) as trainer:
        await trainer.publish(1, 0, buckets())
        coming = asyncio.ensure_future(trainer.coming(2, 0))
        await trainer.publish(2, 0, buckets(coming))

asyncio.run(main())
"""
)

FULL = (
    COMMON
    + """
from asyncflow_core.errors import BackpressureError

async def buckets(count):
    for n in range(count):
        yield Bucket((TensorSpec(f"t{n}", "U8", (400000,)),), np.ones(400000, np.uint8))

async def main():
    async with host(sys.argv[1]) as trainer:
        first = await trainer.publish(1, 0, buckets(1))
        try:
            await trainer.publish(2, 0, buckets(4))
        except BackpressureError as error:
            print("refused:", error)
        async for bucket in (await trainer.fetch(first)).buckets:
            assert bucket.data.all()
        await trainer.publish(2, 0, buckets(1))
        print("fits")

asyncio.run(main())
"""
)


def make(root):
    return HostWeightSync(HostOptions(), PartContext("weights", run_dir=root))


def start_publisher(root):
    command = [sys.executable, "-c", PUBLISHER, str(root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def run(*arguments):
    process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_two_processes_replica_reads_what_the_trainer_published(tmp_path):
    async with make(tmp_path) as trainer:
        published = await trainer.publish(1, 0, stream(random_buckets(1)))
        text = json.dumps(asdict(published))
        code, out = await run(sys.executable, "-c", READER, str(tmp_path), text)
        assert (code, out.split()[-1]) == (0, published.manifest.checksum)
        # The reader's opening and closing took nothing from a living publisher.
        assert len(list((tmp_path / "weights").rglob("*.weights"))) == 1


async def test_publisher_killed_in_the_middle_leaves_nothing_after_the_next_open(tmp_path, caplog):
    child = start_publisher(tmp_path)
    try:
        coming = child.stdout.readline()  # it is half way with version 2
        root = tmp_path / "weights"
        async with make(tmp_path):
            assert len(list(root.glob("pub-*"))) == 1, "a living publisher was swept"
        names = sorted(path.name for path in root.rglob("*.weights"))
        assert names == ["1-v1-l0.weights", "2-v2-l0.weights"]
        command = [sys.executable, "-c", READER, str(tmp_path), coming]
        pipe = asyncio.subprocess.PIPE
        reader = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        assert await reader.stdout.readline() == b"a\n"
        child.send_signal(signal.SIGKILL)
        out, error = await reader.communicate()
        assert out == b""
        assert b"version 2 comes no further than bucket 1: its publisher ended" in error
    finally:
        child.kill()
        child.communicate()
    async with make(tmp_path):
        assert list(root.glob("pub-*")) == []
    assert "dead publisher" in caplog.text


async def test_full_file_system_is_an_error_and_no_signal(tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec "
    if (await run("unshare", "-rm", "sh", "-c", f"{mount} true"))[0]:
        pytest.skip("may not mount a tmpfs in a user namespace")
    python = f'{mount} "$0" -c "$1" {tmp_path}'
    code, out = await run("unshare", "-rm", "sh", "-c", python, sys.executable, FULL)
    assert code == 0, f"exit {code}, {os.strerror(abs(code))}"
    assert out.startswith("refused: version 2 does not fit")
    assert out.strip().endswith("fits")
