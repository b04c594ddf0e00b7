"""Processes of a run: what one is told, and the interface of what starts them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from asyncflow_core.config import ModelConfig, PartConfig, SamplingConfig, Section, StageConfig
from asyncflow_core.flow.running.policies.ready_first import TooStale
from asyncflow_core.services.base import Service
from asyncflow_core.services.data_store import DataStore, TaskSpec
from asyncflow_core.wire import Heartbeat

__all__ = [
    "SUPERVISED",
    "BareRole",
    "End",
    "Launcher",
    "LauncherCapabilities",
    "Life",
    "ProcessSpec",
    "RankRole",
    "Role",
    "RolloutRole",
    "RunningProcess",
    "StageRole",
    "TrainerRole",
]


SUPERVISED = Heartbeat(timeout_s=7 * 24 * 3600.0)
"""Of connections inside a run on one machine: silence ends none of them for a week, so that a run
that is stopped (Ctrl-Z) goes on when it is continued. The kernel tells of a process that died, and
the watchdog finds one that is stuck."""


class BareRole(Section):
    """Serve the service itself; whoever connects calls it."""

    role: Literal["bare"] = "bare"


class RolloutRole(Section):
    """Generate what is leased from the store."""

    role: Literal["rollout"] = "rollout"
    task: TaskSpec
    """The rollout's task."""
    sampling: SamplingConfig
    """How responses are drawn."""
    rows_in_flight: int
    """Rows held at a time."""
    lease_policy: str = "fifo"
    """Which rows go first."""
    share: tuple[int, int] | None = None
    """(number, of how many): only rows that fall to it by their key; None: any row."""
    weight_sync: PartConfig
    """Where weights come from."""


class TrainerRole(Section):
    """Rank 0: lease for all ranks, train steps, publish weights."""

    role: Literal["trainer"] = "trainer"
    task: TaskSpec
    """The trainer's task."""
    columns: tuple[str, ...]
    """Of its reads, what ranks read."""
    loss: PartConfig
    """What is minimised."""
    groups_per_step: int
    """Of one batch."""
    group_size: int
    """Rows of a whole group."""
    updates_per_step: int
    """Shares of a batch."""
    max_staleness: int
    """Bound, in versions."""
    micro_batch_tokens: int
    """Of one rank."""
    whole_batch: bool
    """Wait for an update's whole share first."""
    lease_policy: str = "fifo"
    """Which groups go first."""
    too_stale: TooStale = "requeue"
    """What is done with rows too old, where the task is not in the order of steps."""
    weight_sync: PartConfig
    """Where weights go."""
    proximal: TaskSpec | None = None
    """Log-probs by a step's first weights, where the loss asks for them."""
    overlaps_export: bool = False
    """Export weights beside the next step's gradients."""
    ranks: tuple[str, ...] = ()
    """Addresses of the further ranks, in order."""


class RankRole(Section):
    """A further rank of the trainer."""

    role: Literal["rank"] = "rank"
    weight_sync: PartConfig | None = None
    """Where this rank's share of the weights goes; None if rank 0 yields them all."""


class StageRole(Section):
    """Work on a stage's task."""

    role: Literal["stage"] = "stage"
    task: TaskSpec
    """The stage's task."""
    columns: tuple[str, ...]
    """Of its reads, what the stage is given."""
    stage: StageConfig
    """What runs."""
    model: ModelConfig | None = None
    """Of the stage, where it has one; the process's service is an instance of it."""
    ranks: dict[str, str] = Field(default_factory=dict)
    """Process name to address of the model's further ranks, in order."""


Role = Annotated[
    BareRole | RolloutRole | TrainerRole | RankRole | StageRole, Field(discriminator="role")
]


class ProcessSpec(Section):
    """All that a process of a run is told; JSON on its standard input."""

    name: str
    """In the run: rollout-0, trainer-0, reward-0."""
    kind: str
    """Plugin kind, "stage" for a function."""
    plugin: str = ""
    """Plugin name."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the plugin, validated before."""
    role: Role
    """What the process does with its service."""
    seed: int = 0
    """Of the run."""
    group: str = ""
    """Of the ranks of one service, which meet each other."""
    rank: int = 0
    """Among `world_size`."""
    world_size: int = 1
    """Ranks of the service."""
    run_dir: str
    """Private to the run, for sockets and shared memory."""
    address: str
    """Where the process answers."""
    token: str = Field(repr=False)
    """Secret of the run."""
    store: str = ""
    """Address of a data store that core serves."""
    store_part: PartConfig | None = Field(default=None, repr=False)
    """How to use a data store that serves itself."""
    tokenizer: PartConfig | None = None
    """Of the run, for stages that need texts."""
    python: str
    """Interpreter."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment beside the launcher's own."""
    log_path: str = ""
    """Where its output goes."""


@dataclass(frozen=True, slots=True)
class LauncherCapabilities:
    """What a launcher does.

    Attributes:
        processes: services get processes of their own; else all live in the run's.
        locality: how near they are to each other: "process", "host" or "network".
    """

    processes: bool = True
    locality: str = "host"


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended.

    Attributes:
        words: name, exit status or signal, last log lines.
        final: it would end in the same way again, so it is not started again.
    """

    words: str
    final: bool = False


class Life(ABC):
    """What every process answers beside its service."""

    @abstractmethod
    async def beat(self) -> None:
        """A sign of life: its event loop turns."""


class RunningProcess(ABC):
    """One started process."""

    name: str

    @abstractmethod
    def control(self, interface: type[Any]) -> Any:
        """What the process answers, as an instance of `interface`."""

    @abstractmethod
    async def ready(self) -> None:
        """Wait until it answers; model loads take as long as they take while it lives."""

    @abstractmethod
    async def beat(self) -> None:
        """Wait for a sign of life; of one that is stuck none comes.

        Raises:
            PeerLostError: the connection is gone; its end follows, if it has not come.
        """

    @abstractmethod
    async def ended(self) -> End:
        """Wait until it ends, whoever ended it."""

    @abstractmethod
    async def kill(self) -> None:
        """End it by force, whatever it does."""

    @abstractmethod
    async def bury(self) -> None:
        """Give back what is left of one that ended, and end whatever it had started."""


class Launcher(Service):
    """Starts processes and ends all of them when it is closed, whatever they do."""

    API_VERSION = 1

    @abstractmethod
    async def start(self, spec: ProcessSpec, store: DataStore) -> RunningProcess:
        """Start one; `store` is for launchers without processes of their own."""

    @property
    @abstractmethod
    def run_dir(self) -> Path:
        """The run's private directory."""
