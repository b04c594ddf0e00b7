"""`asyncflow keys new | show`: who may connect from beyond this machine."""

from __future__ import annotations

from asyncflow_core.wire import KeyPair

__all__ = ["new_keys", "show_keys"]


def new_keys(path: str) -> None:
    """Write a new pair and say what goes where."""
    pair = KeyPair.new()
    pair.save(path)
    print(f"wrote {path}, for this side's option `keys`; the secret in it stays on this machine")
    print(f"public key {pair.public.hex()}")
    print("a client's public key goes into the file that the server's option `allow` names, a line")
    print("a client: KEY NAME. A server prints its address with its own key: tcp://HOST:PORT#KEY")


def show_keys(path: str) -> None:
    """Print the public key of a pair."""
    print(KeyPair.load(path).public.hex())
