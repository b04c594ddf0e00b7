"""`asyncflow keys` and `asyncflow serve --keys --allow`, as a user types them."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import asyncflow_core as af
from asyncflow_core.errors import ConfigError, PeerLostError
from asyncflow_core.wire import KeyPair, split_key
from tests.wire.conftest import TOKEN

pytestmark = pytest.mark.multiproc

COMMAND = (sys.executable, "-m", "asyncflow_core.cli")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the command with these arguments in a folder of its own."""
    processes = []

    def call(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=tmp_path,
            env={**os.environ, "ASYNCFLOW_TOKEN": TOKEN},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield call
    for process in processes:
        process.kill()
        process.communicate()


async def test_served_with_keys_made_by_the_command_lets_its_client_in(
    start: Start, tmp_path: Path
) -> None:
    public = {}
    for name in ("server", "client", "stranger"):
        out, err = start("keys", "new", f"{name}.key").communicate(timeout=60)
        public[name] = re.search(r"public key (\w{64})\n", out)[1]
        assert not err
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600
    assert (
        start("keys", "show", "client.key").communicate(timeout=60)[0].strip() == (public["client"])
    )
    (tmp_path / "allow").write_text(f"{public['client']} a client\n")
    process = start(
        *("serve", "data_store", "memory", "--bind", "tcp://0.0.0.0:*"),
        *("--keys", "server.key", "--allow", "allow"),
    )
    assert process.stdout is not None
    address = process.stdout.readline().split()[-1]
    where, key = split_key(address)
    assert key == bytes.fromhex(public["server"])
    here = address.replace("0.0.0.0", "127.0.0.1")

    def opening(name: str) -> object:
        return af.open("data_store", address=here, token=TOKEN, keys=tmp_path / f"{name}.key")

    async with opening("client") as store:
        assert (await store.stats()).rows == 0
    with pytest.raises(PeerLostError, match=f"{public['stranger']} is not in the server's allow"):
        async with opening("stranger"):
            pass
    with pytest.raises(ConfigError, match=r"leads beyond this machine.*asyncflow keys new"):
        async with af.open("data_store", address=where, token=TOKEN):
            pass
    with pytest.raises(ConfigError, match="keys would have no effect"):
        af.open("data_store", "memory", keys=tmp_path / "client.key")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), r"leads beyond this machine.*no keys and allow-list were given.*asyncflow keys new"),
        (("--keys", "own.key"), "no keys and allow-list were given"),
        (("--keys", "none.key", "--allow", "allow"), r"key file 'none.key' cannot be read"),
        (("--keys", "own.key", "--allow", "none"), r"allow-list 'none' cannot be read"),
        (("--keys", "own.key", "--allow", "own.key"), r"own.key:2: the key is not 64 hex digits"),
    ],
)
def test_serve_beyond_this_machine_without_keys_is_refused_before_anything_starts(
    start: Start, tmp_path: Path, arguments: tuple[str, ...], text: str
) -> None:
    KeyPair.new().save(tmp_path / "own.key")
    (tmp_path / "allow").write_text("ab" * 32)
    process = start("serve", "data_store", "memory", "--bind", "tcp://0.0.0.0:*", *arguments)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert re.search(text, err)
    assert not out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("stage", "grpo"), r"'stage' is not a service; services are data_store, rollout"),
        (("data_store", "memry"), r"no data_store plugin 'memry' \(installed: .*'memory'\?"),
        (("data_store", "memory", "capacity_rows"), r"'capacity_rows' is not of the form KEY=VAL"),
        (("data_store", "memory", "capacity=3"), r"option capacity: unknown key; did you mean"),
        (("data_store", "memory", "capacity_rows=0"), r"option capacity_rows: input should be gr"),
    ],
)
def test_serve_of_something_wrong_says_what_and_ends_with_2(
    start: Start, tmp_path: Path, arguments: tuple[str, ...], text: str
) -> None:
    tmp_path.chmod(0o700)
    process = start("serve", *arguments, "--bind", f"ipc://{tmp_path}/s")
    out, err = process.communicate(timeout=60)
    assert err.startswith("asyncflow: 1 fault(s), nothing was started:\n")
    assert re.search(text, err)
    assert (process.returncode, out) == (2, "")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGHUP, 130)]
)
def test_serve_that_is_ended_leaves_no_socket_and_takes_no_living_one(
    start: Start, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    tmp_path.chmod(0o700)
    bind = ("serve", "data_store", "memory", "--bind", f"ipc://{tmp_path}/s")
    first = start(*bind)
    assert first.stdout is not None
    assert first.stdout.readline() == f"serving data_store memory at ipc://{tmp_path}/s\n"
    second = start(*bind)
    assert "another server listens" in second.communicate(timeout=60)[1]
    assert (tmp_path / "s").is_socket()
    first.send_signal(number)
    assert first.wait(timeout=60) in (status, 130)  # 130: before it came to wait for the signal
    assert not (tmp_path / "s").exists()
