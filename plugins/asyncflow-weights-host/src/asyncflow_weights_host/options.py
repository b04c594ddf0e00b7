"""What a user may set."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = ["DiskOptions", "HostOptions", "ZmqOptions"]


class _Versions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    versions: int = Field(default=2, ge=1)
    """Versions held at once, each of the model's size. 2: replicas read one while the next is
    written."""
    publish_timeout_s: float = Field(default=600.0, gt=0)
    """How long a publish waits for a version to be retired. The default outlasts what replicas
    usually take to drain long responses; shorten it to learn of a stuck replica earlier."""


class HostOptions(_Versions):
    """Options of the weight transport `host`."""

    directory: Path | None = None
    """Where the files lie, on a file system in memory for speed; not set: in the run's own
    directory. All services of the run must see it under the same path."""


class ZmqOptions(_Versions):
    """Options of the weight transport `zmq`."""

    listen: str = "ipc"
    """Where trainer and replicas listen, since replicas pass weights on to each other: ipc, in the
    run's directory; tcp://127.0.0.1:* or tcp://[::1]:*; or tcp://INTERFACE:* such as tcp://eth0:*
    to cross hosts, which is encrypted, with keys made for the run and only for who takes part in
    it."""
    stall_s: float = Field(default=10.0, gt=0)
    """Silence after which a replica gives its source up and takes the rest from the trainer; of
    the trainer, after which the transfer has failed."""
    delta: bool = False
    """Move only the bytes that changed to replicas that have the version before. Costs memory for
    one more version on both sides, and the time to find the changes."""

    @field_validator("listen")
    @classmethod
    def _reachable(cls, listen: str) -> str:
        if listen.startswith(("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:")):
            raise ValueError(
                f"{listen!r} does not say where others reach this process; name an address or "
                "interface of this machine, such as tcp://eth0:*"
            )
        return listen


class DiskOptions(_Versions):
    """Options of the weight transport `disk`."""

    directory: Path | None = None
    """Where versions lie, seen by all services under the same path; not set: in the run's own
    directory."""
    source: Literal["path", "buckets"] = "path"
    """What replicas get: the directory of safetensors files, or, for engines that load no files,
    their content."""
    shard_bytes: int = Field(default=2 << 30, ge=1 << 10)
    """Size of a file; a larger bucket goes alone."""
