"""What a user may set."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["ZmqOptions"]


class ZmqOptions(BaseModel):
    """Options of the data store `zmq`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    shards: int = Field(default=2, ge=1, le=64)
    """Processes that own memory."""
    capacity_rows: int = Field(default=65536, ge=1)
    """Rows admitted at once; producers wait while the store is full."""
    capacity_bytes: int = Field(default=2 << 30, ge=1)
    """Bytes reserved at once, by the `row_bytes` of puts."""
    max_staleness: int = Field(default=0, ge=0)
    """Versions by which a rollout may be ahead of the step that trains its rows."""
    max_gap_s: float = Field(default=5.0, gt=0)
    """A longer silence of the controller's clock means that it was stopped: leases live longer."""
    durability: Literal["none", "journal", "fsync"] = "none"
    """none: nothing outlives the store. journal: rows survive the death of any process of it.
    fsync: also of the machine."""
    directory: Path | None = None
    """Where memory and journal lie. Not set: in memory (/dev/shm), removed at the end. A durable
    store needs one, on a disk."""
    bind: str = ""
    """Where clients connect; not set: a socket of this machine."""
    connect: str = ""
    """Use the store that answers here instead of starting one."""
    token: str = Field(default="", repr=False)
    """Secret of the store to connect to."""

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Self:
        if self.connect and not self.token:
            raise ValueError("'connect' needs the 'token' of that store")
        return self
