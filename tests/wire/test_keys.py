"""Key files, allow-lists and addresses with keys: what is written is read, the rest is refused."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import IO

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from asyncflow_core.errors import ConfigError
from asyncflow_core.wire import KeyPair, check_reach, is_local, load_allowed, split_key, with_key
from asyncflow_core.wire.keys import parse_key

KEY = "ab" * 32


def test_saved_pair_is_private_and_comes_back(tmp_path: Path) -> None:
    pair = KeyPair.new()
    pair.save(tmp_path / "own.key")
    assert stat.S_IMODE((tmp_path / "own.key").stat().st_mode) == 0o600
    assert KeyPair.load(tmp_path / "own.key") == pair
    assert zmq.curve_public(z85.encode(pair.secret)) == z85.encode(pair.public)
    assert pair.secret.hex() not in repr(pair)
    assert str(pair.secret) not in repr(pair)


def test_key_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "own.key"
    KeyPair.new().save(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"cannot be written: File exists.*name a new file"):
        KeyPair.new().save(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"public {KEY}\n", "has no pair"),
        (f"public {KEY}\npublic {KEY}\n", r":2: not a line of a key file"),
        (f"secret {KEY[:-1]}\npublic {KEY}\n", r":1: the key is not 64 hex digits, it has 63"),
        ("hello\n", r":1: not a line"),
        ("", "has no pair"),
    ],
)
def test_garbled_key_file_is_refused_by_line_without_telling_it(
    tmp_path: Path, text: str, why: str
) -> None:
    path = tmp_path / "own.key"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(ConfigError, match=why) as caught:
        KeyPair.load(path)
    assert KEY[:32] not in str(caught.value)


def test_key_file_that_others_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.key"
    KeyPair.new().save(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"mode 0640.*chmod 600"):
        KeyPair.load(path)
    with pytest.raises(ConfigError, match=r"cannot be read.*asyncflow keys new"):
        KeyPair.load(tmp_path / "none.key")


def test_allow_list_takes_names_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "allow"
    path.write_text(f"# who may\n{KEY} trainer of Ann\n\n{'cd' * 32}  # Bob\n")
    assert load_allowed(path) == {b"\xab" * 32, b"\xcd" * 32}


@pytest.mark.parametrize(
    ("text", "why"), [("# nobody\n", "lets nobody in"), (f"{KEY}\nann {KEY}\n", r":2: the key")]
)
def test_allow_list_without_keys_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "allow"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        load_allowed(path)


@given(st.binary(min_size=32, max_size=32))
def test_address_with_key_comes_apart_again(key: bytes) -> None:
    assert split_key(with_key("tcp://10.0.0.1:5555", key)) == ("tcp://10.0.0.1:5555", key)
    assert split_key("ipc:///run/s") == ("ipc:///run/s", None)


@given(st.text())
def test_text_is_a_key_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert parse_key(text).hex() == text.lower()


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("ipc:///run/s", True),
        ("tcp://127.0.0.1:*", True),
        ("tcp://127.8.0.1:80", True),
        ("tcp://[::1]:80", True),
        ("tcp://0.0.0.0:80", False),
        ("tcp://*:80", False),
        ("tcp://eth0:*", False),
        ("tcp://10.0.0.1:80", False),
        ("tcp://localhost.example.org:80", False),
        ("tcp://[::]:80", False),
        ("tcp://[fe80::1]:80", False),
    ],
)
def test_is_local_means_that_no_other_machine_gets_there(address: str, local: bool) -> None:
    assert is_local(address) is local


@pytest.mark.parametrize(
    "where", ["127.0.0.1:65536", "10.0.0.1:99999", "127.0.0.1", "[::1]", "::1:80", "h:x"]
)
def test_address_without_a_port_that_exists_is_refused(where: str) -> None:
    with pytest.raises(ConfigError, match=r"needs a port from 0 to 65535, or \*: HOST:PORT"):
        is_local(f"tcp://{where}")


@pytest.mark.parametrize(
    ("address", "bind", "keys", "why"),
    [
        ("tcp://*:1", True, False, r"leads beyond.*no keys and allow-list were given.*keys new"),
        (f"tcp://10.0.0.1:1#{KEY}", True, True, "to listen at names a key"),
        ("tcp://10.0.0.1:1", False, False, r"leads beyond.*no keys were given"),
        ("tcp://10.0.0.1:1", False, True, "does not say which key its server has"),
        ("tcp://127.0.0.1:1", False, True, "does not say which key its server has"),
        (f"tcp://127.0.0.1:1#{KEY}", False, False, "takes encrypted connections only"),
        ("tcp://10.0.0.1:1#zz", False, True, "'zz' is no key"),
        ("udp://10.0.0.1:1", True, True, "neither ipc"),
        ("tcp://*:1", True, True, None),
        ("tcp://eth0:*", True, True, None),
        ("tcp://127.0.0.1:1", True, True, None),
        ("tcp://127.0.0.1:1", True, False, None),
        (f"tcp://10.0.0.1:1#{KEY}", False, True, None),
        ("ipc:///run/s", False, False, None),
    ],
)
def test_reach_beyond_this_machine_needs_keys(
    address: str, bind: bool, keys: bool, why: str | None
) -> None:
    if why is None:
        check_reach(address, bind=bind, keys=keys)
        return
    with pytest.raises(ConfigError, match=why):
        check_reach(address, bind=bind, keys=keys)


def test_key_pair_for_which_there_is_no_room_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, *_: object, **__: object) -> IO[str]:
        os.close(descriptor)
        return open("/dev/full", "w", encoding="ascii")

    monkeypatch.setattr("os.fdopen", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        KeyPair.new().save(tmp_path / "pair")
    assert not list(tmp_path.iterdir())
