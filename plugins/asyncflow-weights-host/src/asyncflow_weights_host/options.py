"""What a user may set."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["HostOptions"]


class HostOptions(BaseModel):
    """Options of the weight transport `host`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    versions: int = Field(default=2, ge=1)
    """Versions held at once. Each takes the model's size in memory. 2: replicas read one while
    the next is written."""
    publish_timeout_s: float = Field(default=600.0, gt=0)
    """How long a publish waits for a version to be retired. The default outlasts what replicas
    usually take to drain long responses; shorten it to learn of a stuck replica earlier."""
    directory: Path | None = None
    """Where the files lie, on a file system in memory for speed; not set: in the run's own
    directory. All services of the run must see it under the same path."""
