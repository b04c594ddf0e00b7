"""What a user may set."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["CollectiveOptions"]


class CollectiveOptions(BaseModel):
    """Options of the weight transport `collective`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo between CPUs, nccl between GPUs."""
    host: str = "127.0.0.1"
    """Address of the trainer's machine, as replicas see it. Beyond loopback nothing is encrypted
    and nobody is asked who they are: only on a network you trust."""
    versions: int = Field(default=2, ge=1)
    """Versions held at once in the trainer's host memory, each of the model's size."""
    publish_timeout_s: float = Field(default=600.0, gt=0)
    """How long a publish waits for a version to be retired."""
    gather_s: float = Field(default=0.05, ge=0)
    """How long a broadcast waits for more replicas that want the same version."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of joining a group, and of each broadcast in it."""
