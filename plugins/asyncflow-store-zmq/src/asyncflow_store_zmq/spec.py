"""What the processes of a store are told, and the names of their files.

No pydantic here: it would take a third of what an idle process weighs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncflow_core.wire import Heartbeat, KeyPair, Server, load_allowed, split_key

__all__ = ["StoreSpec"]

_PATIENT = Heartbeat(timeout_s=7 * 24 * 3600.0)


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """One store.

    Attributes:
        directory: of arenas and journal, mode 0700.
        sockets: directory of ipc sockets, mode 0700.
        address: where the controller answers.
        token: secret of the run.
        shards: arenas, each with its process.
        shard_addresses: where those answer, once they do.
        durability: none, journal or fsync.
        capacity_rows, capacity_bytes, max_staleness, max_gap_s: as in the ledger.
        keys, allow: files of the store's key pair and of the public keys it lets in, if it has any.
        lease_policies: names of further ones.
        remember_rows: as in the ledger.
        rehearse: whether the controller does so; see `rehearsal.py`.
    """

    directory: str
    sockets: str
    address: str
    token: str
    shards: int
    durability: str
    capacity_rows: int
    capacity_bytes: int
    max_staleness: int
    max_gap_s: float
    shard_addresses: tuple[str, ...] = ()
    keys: str = ""
    allow: str = ""
    lease_policies: tuple[str, ...] = ()
    remember_rows: int = 65536
    rehearse: bool = True

    def dump(self) -> bytes:
        """One line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def load(cls, line: bytes) -> StoreSpec:
        """Inverse of `dump`."""
        return cls(**json.loads(line))

    def arena(self, shard: int) -> Path:
        """A shard's memory."""
        return Path(self.directory) / f"shard-{shard}.arena"

    def shard_address(self, shard: int) -> str:
        """Where a shard is to listen: where it did, or as the controller, at a port of its own."""
        if shard < len(self.shard_addresses):
            return split_key(self.shard_addresses[shard])[0]
        if self.address.startswith("tcp://"):
            where, _ = split_key(self.address)
            return f"{where.rpartition(':')[0]}:*"
        return f"ipc://{self.sockets}/shard-{shard}.sock"

    def server(self, address: str, *, name: str) -> Server:
        """A server of the store at an address."""
        return Server(
            address,
            name=name,
            token=self.token,
            keys=self.key_pair(),
            allow=load_allowed(self.allow) if self.allow else (),
            # A client on this machine that is silent is stopped, not lost: it may go on, and its
            # leases tell others how long they wait for it.
            heartbeat=_PATIENT if address.startswith("ipc://") else None,
        )

    def key_pair(self) -> KeyPair | None:
        """The store's own."""
        return KeyPair.load(self.keys) if self.keys else None
