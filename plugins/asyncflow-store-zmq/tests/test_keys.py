"""A store reached from other machines: encrypted, and only for the keys it was told to let in."""

from __future__ import annotations

import asyncio
import subprocess

import pytest
from pydantic import ValidationError

from asyncflow_core.batch import GroupKey
from asyncflow_core.cli.main import main
from asyncflow_core.errors import PeerLostError
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.data_store import prompts
from asyncflow_core.wire import KeyPair, split_key
from asyncflow_store_zmq.blocking import BlockingStore
from asyncflow_store_zmq.face import AsyncExperiences
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

KEY = "ab" * 32
LOG = TaskSpec("log", ("prompt_ids",))


def host():
    """An address of this machine that others could reach too; the loopback where there is none."""
    found = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False)
    return next((ip for ip in found.stdout.split() if "." in ip), "127.0.0.1")


@pytest.fixture
def keys(tmp_path):
    """Key files of a store, a client and a stranger; an allow-list with the client's."""
    for name in ("store", "client", "stranger"):
        KeyPair.new().save(tmp_path / f"{name}.key")
    client = KeyPair.load(tmp_path / "client.key")
    (tmp_path / "allow").write_text(f"{client.public.hex()} a trainer\n")
    return tmp_path


@pytest.mark.multiproc
async def test_allowed_clients_reach_controller_and_shards_and_strangers_neither(keys):
    options = ZmqOptions(
        bind=f"tcp://{host()}:*", keys=str(keys / "store.key"), allow=str(keys / "allow")
    )
    owner = ZmqDataStore(options)
    async with owner:
        for address in (owner.address, *owner.processes.spec.shard_addresses):
            where, key = split_key(address)
            assert where.startswith(f"tcp://{host()}:")
            assert key == KeyPair.load(keys / "store.key").public
        registration = await owner.register(LOG)
        await owner.put(prompts(3), keys=[GroupKey(0, 0, i) for i in range(3)])

        token = owner.attach_options()["token"]
        client = ZmqOptions(connect=owner.address, token=token, keys=str(keys / "client.key"))
        async with ZmqDataStore(client, name="client") as store:
            lease = await store.lease("log", requester="client", limit_rows=2)
            batch = await store.read(lease.ref(), ["prompt_ids"])
            assert batch.rows == 2
            await store.commit(lease.ref())

        def block():
            pair = KeyPair.load(keys / "client.key")
            with BlockingStore(owner.address, token=token, keys=pair) as store:
                lease = store.lease("log", requester="blocking")
                return store.read(lease.ref(), ["prompt_ids"]).rows

        assert await asyncio.to_thread(block) == 1
        async with AsyncExperiences(owner.address, token=token, keys=keys / "client.key") as face:
            assert (await face.store.stats()).rows == 1
        async with ZmqDataStore(ZmqOptions(**owner.attach_options()), name="again") as store:
            assert (await store.stats()).rows == 1

        stranger = ZmqOptions(connect=owner.address, token=token, keys=str(keys / "stranger.key"))
        with pytest.raises(PeerLostError, match="is not in the server's allow-list"):
            await ZmqDataStore(stranger).open()
        await registration.aclose()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bind": "tcp://10.0.0.5:5"}, r"no keys and allow-list were given.*asyncflow keys new"),
        ({"bind": "tcp://10.0.0.5:5", "keys": "k"}, "no keys and allow-list were given"),
        ({"bind": "tcp://*:5", "keys": "k", "allow": "a"}, "does not say where clients reach"),
        ({"bind": "tcp://0.0.0.0:5", "keys": "k", "allow": "a"}, "does not say where clients"),
        ({"keys": "k"}, "'keys' has no effect without 'allow'"),
        ({"allow": "a"}, "'allow' has no effect without 'keys'"),
        ({"connect": "tcp://10.0.0.5:5", "token": "t"}, "leads beyond this machine"),
        ({"connect": f"tcp://10.0.0.5:5#{KEY}", "token": "t"}, "takes encrypted connections only"),
        ({"connect": "tcp://10.0.0.5:5", "token": "t", "keys": "k"}, "which key its server has"),
        (
            {"connect": f"tcp://10.0.0.5:5#{KEY}", "token": "t", "keys": "k", "allow": "a"},
            "'allow' has no effect with 'connect'",
        ),
    ],
)
def test_options_that_would_leave_it_open_or_mean_nothing_are_refused(options, text):
    with pytest.raises(ValidationError, match=text):
        ZmqOptions(**options)


def test_doctor_names_file_and_line_of_an_open_address(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "data_store:\n  plugin: zmq\n  options:\n    shards: 2\n    bind: tcp://0.0.0.0:5555\n"
    )
    assert main(["doctor", "run.yaml"]) == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if "leads beyond" in line]
    assert len(lines) == 1
    assert "run.yaml:5" in lines[0]
    assert "data_store.options.bind" in lines[0]
    assert "asyncflow keys new" in lines[0]
