"""What the processes of a store are told, and the names of their files.

No pydantic here: it would take a third of what an idle process weighs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["StoreSpec"]


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
        """Where a shard is to listen."""
        if self.address.startswith("tcp://"):
            return "tcp://127.0.0.1:*"
        return f"ipc://{self.sockets}/shard-{shard}.sock"
