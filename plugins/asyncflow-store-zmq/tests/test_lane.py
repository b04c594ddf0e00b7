"""The lane: any cut of the stream gives the messages, and who breaks the form harms only itself."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import struct
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow_core.batch import Batch, Column, GroupKey
from asyncflow_core.errors import ConfigError, PeerLostError, ProtocolError, WireDecodeError
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.aio import eventually
from asyncflow_core.wire import WIRE_VERSION, Limits, decode, encode
from asyncflow_store_zmq.blocking import BlockingStore
from asyncflow_store_zmq.lane import Inbox, framed, lane_of
from asyncflow_store_zmq.lane_client import LaneClient
from asyncflow_store_zmq.layout import pack
from asyncflow_store_zmq.options import ZmqOptions
from asyncflow_store_zmq.store import ZmqDataStore

from .conftest import TOKEN

TASK = TaskSpec("train", ("score",))


@given(
    st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=4), max_size=5),
    st.lists(st.integers(1, 30), min_size=1),
)
def test_messages_come_out_whole_however_the_stream_is_cut(messages, cuts):
    stream = b"".join(b"".join(framed(parts)) for parts in messages)
    inbox, found, number = Inbox(Limits()), [], 0
    while stream:
        size = cuts[number % len(cuts)]
        number += 1
        inbox.add(stream[:size])
        stream = stream[size:]
        while (parts := inbox.take()) is not None:
            found.append([bytes(part) for part in parts])
    assert found == messages


@pytest.mark.parametrize(
    "start",
    [
        struct.pack("<I", 0),
        struct.pack("<I", 3),
        struct.pack("<IQ", 1, 5000),
        struct.pack("<IQQ", 2, 5, 5000),
        struct.pack("<IQ", 1, 1 << 63),
    ],
)
def test_message_over_a_limit_is_refused_before_it_is_kept(start):
    inbox = Inbox(Limits(frames=1, frame_bytes=4096, header_bytes=4096, total_bytes=8192))
    inbox.add(start)
    with pytest.raises(WireDecodeError):
        inbox.take()


@pytest.fixture
async def store():
    async with ZmqDataStore(ZmqOptions(capacity_rows=10_000)) as service:
        yield service


@pytest.fixture
def connect(store):
    """Opens raw sockets at the lane."""
    found = []

    def open_one():
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(10.0)
        sock.connect(str(lane_of(store.address)))
        found.append(sock)
        return sock

    yield open_one
    for sock in found:
        sock.close()


def blocking(store):
    return BlockingStore(store.address, token=store.attach_options()["token"])


def hello(store):
    token = store.attach_options()["token"]
    return b"".join(framed(encode([WIRE_VERSION, token, "raw"])))


def put(client, first, count=1):
    scores = Batch({"score": Column.dense(np.arange(count), np.float32)})
    client.put(scores, keys=[GroupKey(0, 0, first + i) for i in range(count)])


HOSTILE = [
    b"GET / HTTP/1.1\r\n\r\n",
    bytes(4),
    struct.pack("<IQ", 1, 1 << 40),
    b"".join(framed([b"\xc1"])),
    b"".join(framed(encode("hello"))),
    b"".join(framed(encode([]))),
    os.urandom(1 << 16),
]


@pytest.mark.parametrize("data", HOSTILE)
@pytest.mark.parametrize("known", [False, True])
async def test_broken_stream_is_cut_off_and_others_go_on(store, connect, data, known):
    with blocking(store) as client:
        client.register(TASK)
        sock = connect()
        if known:
            sock.sendall(hello(store))
            assert sock.recv(100)
        sock.sendall(data)
        assert sock.recv(100) == b""
        put(client, 0)
        assert client.lease("train", requester="a") is not None


async def test_client_with_another_token_is_told_so(store):
    client = LaneClient(lane_of(store.address), name="x", token="wrong")
    with pytest.raises(ProtocolError, match="token"):
        client.open()


async def test_unknown_method_and_malformed_arguments_are_errors_of_their_call(store, connect):
    client = LaneClient(lane_of(store.address), name="x", token=store.attach_options()["token"])
    client.open()
    for method, arguments in (("nothing", []), ("lease", [1, 2]), ("renew", [["a"], 1.0])):
        number = client.send(f"store.{method}", {"m": arguments})
        with pytest.raises(Exception, match=method):
            client.wait(number, timeout_s=10.0)
    number = client.send("store.hello", {"m": []})
    assert client.wait(number, timeout_s=10.0)
    client.close()


async def test_half_a_message_and_the_end_leave_nothing_behind(store, connect):
    sock = connect()
    sock.sendall(hello(store) + struct.pack("<IQ", 1, 1000) + b"half")
    assert sock.recv(100)
    sock.close()
    assert (await store.stats()).rows == 0


async def test_answers_that_are_not_read_yet_all_come_in_the_end(store):
    client = LaneClient(lane_of(store.address), name="x", token=store.attach_options()["token"])
    client.open()
    numbers = [client.send("store.stats", {"m": [0, 0.0]}) for _ in range(2000)]
    for number in reversed(numbers):
        assert client.wait(number, timeout_s=30.0)["capacity_rows"] == 10_000
    client.close()


WAITER = """
import sys
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_store_zmq.blocking import BlockingStore
with BlockingStore(sys.argv[1], token=sys.argv[2]) as client:
    client.register(TaskSpec("train", ("score",)))
    client.lease("train", requester="dead", wait_s=60.0)
"""


async def test_waiting_lease_of_a_client_that_died_takes_no_row(store):
    token = store.attach_options()["token"]
    dead = await asyncio.create_subprocess_exec(sys.executable, "-c", WAITER, store.address, token)
    with blocking(store) as client:
        try:
            await eventually(lambda: "train" in client.stats().tasks, timeout_s=60.0)
        finally:
            dead.kill()
            await dead.wait()
        client.register(TASK)
        put(client, 0, count=3)
        lease = client.lease("train", requester="alive", wait_s=10.0)
        assert len(lease.rows) == 3


async def test_faults_of_a_task_cross_the_lane_one_by_one(store):
    with blocking(store) as client, pytest.raises(ConfigError) as caught:
        client.register(TaskSpec("x", ("a", "b"), ("a", "b"), partitions=()))
    assert len(caught.value.faults) == 2


async def test_end_of_the_store_is_seen_at_once(store):
    client = blocking(store)
    client.open()
    client.register(TASK)
    os.kill(store.processes.pids[-1], signal.SIGKILL)
    with pytest.raises(PeerLostError, match="gone"):
        client.lease("train", requester="a", wait_s=60.0)
    with pytest.raises(PeerLostError):
        client.stats()
    client.close()


async def test_put_of_a_client_cut_off_before_it_began_to_wait_keeps_no_memory(store, connect):
    with blocking(store) as client:
        client.register(TASK)
        put(client, 0, count=10_000)  # no room for more
        before = client.stats().bytes
        sock = connect()
        sock.sendall(hello(store))
        assert sock.recv(100)
        sock.sendall(b"".join(framed(encode([1, "lend", [1000, []]]))))
        inbox = Inbox(Limits())
        while (parts := inbox.take()) is None:
            inbox.add(sock.recv(1000))
        _, (shard, slot, _) = decode(parts, limits=Limits())
        packed = pack(Batch({"score": Column.dense(np.zeros(1), np.float32)}))
        written = [shard, slot, slot << 20, packed.nbytes, 1, packed.layout.dump()]
        facts = [struct.pack("<3q", 7, 0, 0), struct.pack("<i", 0), struct.pack("<i", -1)]
        call = [2, "put", [written, *facts, 1, None, "train", 0, None, [[], 0]]]
        sock.sendall(b"".join([*framed(encode(call)), bytes(4)]))  # a message of no parts
        assert sock.recv(100) == b""
        await eventually(lambda: client.stats().bytes == before, timeout_s=10.0)
        assert client.stats().waiting_puts == 0


async def test_clients_without_a_descriptor_to_let_them_in_wait_and_cost_little(serve, caplog):
    async with serve() as options:
        sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(4)]
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(s.fileno() for s in sockets), allowed[1]))
        try:
            for sock in sockets:
                sock.setblocking(False)
                sock.connect(str(lane_of(options["connect"])))
            for _ in range(1000):  # rounds of the loop that serves them
                await asyncio.sleep(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
        told = [record for record in caplog.records if "let in" in record.message]
        assert len(told) == 1
        loop = asyncio.get_running_loop()
        for sock in sockets:
            await loop.sock_sendall(sock, b"".join(framed(encode([WIRE_VERSION, TOKEN, "raw"]))))
            assert await asyncio.wait_for(loop.sock_recv(sock, 100), 30.0)
            sock.close()


async def test_call_cut_off_as_it_was_sent_ends_its_connection(store):
    token = store.attach_options()["token"]
    client = LaneClient(lane_of(store.address), name="x", token=token)
    client.open()

    class Cut:
        """A socket whose user is interrupted when half of a message has left."""

        def __init__(self, sock):
            self.sock = sock

        def sendmsg(self, parts):
            return self.sock.send(b"".join(parts)[:20])

        def sendall(self, _rest):
            raise KeyboardInterrupt

        def close(self):
            self.sock.close()

    client._sock = Cut(client._sock)
    with pytest.raises(KeyboardInterrupt):
        client.send("store.stats", {"m": [0, 0.0]})
    with pytest.raises(PeerLostError, match="cut off"):  # and no call is put together with its half
        client.send("store.stats", {"m": [0, 0.0]})
    assert (await store.stats()).rows == 0
