"""What a user may set."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from asyncflow_core.config import InputPath
from asyncflow_core.errors import ConfigError
from asyncflow_core.wire import check_reach

__all__ = ["ZmqOptions"]

_EVERYWHERE = ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:")


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
    lease_policies: tuple[str, ...] = ()
    """Lease policies of other plugins, by name; a section's `lease_policy` may name them then."""
    rehearse: bool = True
    """Whether the controller keeps its code in the processor's caches while rows come slowly, so
    that the next is with its reader sooner. It takes up to a tenth of one core for that, and
    nothing while nothing comes."""
    restarts: int = Field(default=3, ge=0)
    """Times each process of the store is started again when it dies. The controller only of a
    durable store: without, its rows are gone, and what uses it ends."""
    reconnect_s: float = Field(default=0.0, ge=0)
    """With `connect`: how long calls wait for a store that died and is started again; 0: its end is
    their error. Who starts a durable store waits a minute, and so do the processes of its run."""
    keys: InputPath | None = None
    """File of this side's key pair (`asyncflow keys new FILE`): of the store, or, with `connect`,
    of this client."""
    allow: InputPath | None = None
    """File of the public keys of clients to let in, one a line; for a store that is started here
    and reached from other machines."""
    bind: str = ""
    """Where clients connect; not set: a socket of this machine. With `keys` and `allow` also
    tcp://HOST:PORT or tcp://INTERFACE:PORT."""
    connect: str = ""
    """Use the store that answers here instead of starting one: its address as it says it,
    tcp://HOST:PORT#KEY where it has keys."""
    token: str = Field(default="", repr=False)
    """Secret of the store to connect to."""

    @field_validator("bind")
    @classmethod
    def _reachable_with_keys_only(cls, bind: str, info: ValidationInfo) -> str:
        if not bind:
            return bind
        try:
            check_reach(
                bind, bind=True, keys=bool(info.data.get("keys") and info.data.get("allow"))
            )
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if bind.startswith(_EVERYWHERE):
            raise ValueError(
                f"{bind!r} does not say where clients reach the store and its shards; name this "
                "machine's address or interface, such as tcp://10.0.0.5:5555 or tcp://eth0:5555"
            )
        return bind

    @field_validator("connect")
    @classmethod
    def _encrypted_beyond_this_machine(cls, connect: str, info: ValidationInfo) -> str:
        if connect:
            try:
                check_reach(connect, bind=False, keys=info.data.get("keys") is not None)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return connect

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Self:
        if self.connect and not self.token:
            raise ValueError("'connect' needs the 'token' of that store")
        if self.reconnect_s and not self.connect:
            raise ValueError("'reconnect_s' is for 'connect'; a store that is started here waits")
        if self.connect and self.allow:
            raise ValueError("'allow' has no effect with 'connect': it is for who starts the store")
        if not self.connect and (self.keys is None) != (self.allow is None):
            given, missing = ("keys", "allow") if self.keys else ("allow", "keys")
            raise ValueError(f"{given!r} has no effect without {missing!r}; give both, or neither")
        return self
