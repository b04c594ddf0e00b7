"""The handshake as a client sees it, the same for both clients. Pure."""

from __future__ import annotations

import pytest
import zmq

from asyncflow_core.errors import (
    PeerLostError,
    ProtocolError,
    ServiceClosedError,
    WireDecodeError,
    WireVersionError,
)
from asyncflow_core.wire import WIRE_VERSION, KeyPair, with_key
from asyncflow_core.wire import _protocol as p
from asyncflow_core.wire._link import WATCHED, Link

KEYS = KeyPair.new()


def link(address: str = "tcp://127.0.0.1:1", keys: KeyPair | None = None) -> Link:
    return Link(
        address, name="near", token="t", connect_s=1.0, limits=None, heartbeat=None, keys=keys
    )


def test_welcome_tells_the_servers_name_and_what_it_offers() -> None:
    it = link()
    assert it.hello() == [p.HELLO, WIRE_VERSION, "t", "near"]
    assert it.service == "tcp://127.0.0.1:1"
    it.take([p.NOOP])
    assert not it.welcomed
    it.take([p.WELCOME, WIRE_VERSION, "far", {"s": ["S", 1, ["double"]]}, "of a newer server"])
    assert (it.welcomed, it.service) == (True, "far")
    assert it.catalogue == {"s": ("S", 1, ["double"])}


@pytest.mark.parametrize(
    ("version", "side"), [(WIRE_VERSION + 1, "client"), (WIRE_VERSION - 1, "server")]
)
def test_welcome_of_another_wire_version_says_which_side_to_upgrade(
    version: int, side: str
) -> None:
    with pytest.raises(WireVersionError, match=rf"version {version} .*'near'.*side of the {side}"):
        link().take([p.WELCOME, version, ["of", "another"], "form"])


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ([p.GOODBYE, ServiceClosedError.code, "closed"], PeerLostError),
        ([p.GOODBYE, "protocol", "wrong token"], ProtocolError),
        ([p.WELCOME, WIRE_VERSION, "far", {"s": 3}], WireDecodeError),
        ([p.WELCOME, WIRE_VERSION, 3, {}], WireDecodeError),
        ([77], WireDecodeError),
        ("text", WireDecodeError),
        (None, WireDecodeError),
    ],
)
def test_other_messages_raise_what_they_mean(message: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        link().take(message)


def test_lost_link_raises_a_new_error_each_time() -> None:
    it = link()
    it.check()
    it.lost = it.ended(zmq.EVENT_DISCONNECTED)
    caught = []
    for _ in range(2):
        with pytest.raises(PeerLostError, match="its process ended") as info:
            it.check()
        caught.append(info.value)
    assert caught[0] is not caught[1]


@pytest.mark.parametrize(
    ("event", "keyed", "text"),
    [
        (zmq.EVENT_HANDSHAKE_FAILED_AUTH, True, f"public key {KEYS.public.hex()} is not in"),
        (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, True, "did not prove to hold the key"),
        (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, True, "takes no encrypted connections"),
        (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, False, "give the client keys too"),
        (zmq.EVENT_DISCONNECTED, False, "its process ended"),
    ],
)
def test_each_way_to_be_refused_has_its_sentence(event: int, keyed: bool, text: str) -> None:
    assert event & WATCHED
    address = "tcp://127.0.0.1:1"
    it = link(with_key(address, KEYS.public), KEYS) if keyed else link(address)
    assert text in str(it.ended(event))
    assert KEYS.secret.hex() not in str(it.ended(event))
