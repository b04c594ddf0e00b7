"""CURVE key pairs and allow-lists: who may connect from beyond this machine.

A key is 32 bytes, in files and addresses 64 hex digits. A server that listens beyond the machine
has a pair and a list of the public keys it lets in; an address `tcp://HOST:PORT#KEY` says which
public key the server there has, and a client connects with a pair of its own.

Source: CurveZMQ (ZeroMQ RFC 26).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from asyncflow_core.errors import ConfigError

__all__ = ["KEY_BYTES", "KeyPair", "load_allowed", "parse_key"]

KEY_BYTES = 32
_HEADING = "# AsyncFlow CURVE key pair. Whoever reads this file is you: keep it to yourself.\n"


def parse_key(text: str) -> bytes:
    """A key from its 64 hex digits.

    Raises:
        ConfigError: it is none.
    """
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES or len(text) != 2 * KEY_BYTES:
        raise ConfigError(
            f"{text[:70]!r} is no key: a key is {2 * KEY_BYTES} hex digits, as "
            "`asyncflow keys show FILE` prints it"
        )
    return key


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key, and the secret that goes with it; 32 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        """A fresh pair."""
        public, secret = zmq.curve_keypair()
        return cls(z85.decode(public), z85.decode(secret))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a new file that only its owner reads.

        Raises:
            ConfigError: the file is there already, or cannot be written.
        """
        text = f"{_HEADING}public {self.public.hex()}\nsecret {self.secret.hex()}\n"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(descriptor, "w", encoding="ascii") as file:
                    file.write(text)
            except OSError:  # no room: half a pair is none, and would be in the way
                os.unlink(path)
                raise
        except OSError as error:
            raise ConfigError(
                f"the key file {os.fspath(path)!r} cannot be written: {error.strerror}; "
                "keys are never overwritten, name a new file"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KeyPair:
        """Read what `save` wrote.

        Raises:
            ConfigError: the file is missing, readable by others, or no key pair.
        """
        name = os.fspath(path)
        text = _read(Path(path), "key file", "make one with `asyncflow keys new FILE`")
        mode = stat.S_IMODE(Path(path).stat().st_mode)
        if mode & 0o077:
            raise ConfigError(
                f"the key file {name!r} has mode {mode:04o}: others may read the secret in it; "
                f"only 0600 is allowed; try: chmod 600 {name}"
            )
        found = {}
        for number, words in _lines(text):
            match words:
                case ["public" | "secret" as which, digits] if which not in found:
                    found[which] = _key_at(name, number, digits)
                case _:
                    raise ConfigError(
                        f"{name}:{number}: not a line of a key file, which says `public KEY` and "
                        "`secret KEY`, once each"
                    )
        if len(found) != 2:
            raise ConfigError(f"the key file {name!r} has no pair: a `public` and a `secret` line")
        return cls(found["public"], found["secret"])


def load_allowed(path: str | os.PathLike[str]) -> frozenset[bytes]:
    """The public keys of an allow-list: one a line, with a name after it; # begins a comment.

    Raises:
        ConfigError: the file is missing, has a line without a key, or no key at all.
    """
    name = os.fspath(path)
    hint = "write the public keys of your clients into it, one a line"
    text = _read(Path(path), "allow-list", hint)
    keys = frozenset(_key_at(name, number, words[0]) for number, words in _lines(text))
    if not keys:
        raise ConfigError(f"the allow-list {name!r} lets nobody in; {hint}")
    return keys


def _read(path: Path, what: str, hint: str) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the {what} {str(path)!r} cannot be read: {error}; {hint}") from error


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            yield number, words


def _key_at(name: str, number: int, digits: str) -> bytes:
    try:
        return parse_key(digits)
    except ConfigError as error:
        # The digits may be a secret that was mistyped.
        raise ConfigError(
            f"{name}:{number}: the key is not {2 * KEY_BYTES} hex digits, it has {len(digits)} "
            "characters; copy it again from `asyncflow keys show FILE`"
        ) from error
