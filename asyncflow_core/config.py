"""What a user writes: the typed model of one run.

Every field's docstring is its documentation; a default stands here and nowhere else. A section that
selects a plugin has `plugin` and `options`; the options are validated by that plugin's own model.
Reading YAML, overrides and line numbers is `asyncflow_core.config_source`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    model_validator,
)

__all__ = [
    "CheckpointConfig",
    "EvaluationConfig",
    "FunctionName",
    "InputPath",
    "ModelConfig",
    "PartConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "ServiceConfig",
    "StageConfig",
    "TrainerConfig",
    "WatchdogConfig",
    "WeightSyncConfig",
    "WorkflowConfig",
    "with_default_plugins",
]


class Section(BaseModel):
    """Base of all sections and of plugins' option models: frozen, unknown keys refused.

    Numbers are finite: what is not has no form in the JSON that a process is told.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def _resolve(value: str, info: ValidationInfo) -> str:
    base = (info.context or {}).get("base_dir")
    path = Path(value).expanduser()
    return str(path if path.is_absolute() or base is None else Path(base) / path)


InputPath = Annotated[str, AfterValidator(_resolve)]
"""A path that is read; relative to the folder of the configuration file."""


def _function_name(function: str | Callable[..., Any]) -> str:
    if isinstance(function, str):
        return function
    return f"{function.__module__}:{function.__qualname__}"


FunctionName = Annotated[
    str | Callable[..., Any], PlainSerializer(_function_name, return_type=str, when_used="always")
]
"""A function by `module:name`, or, from Python, the function itself."""


StageName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=40)]
"""It names processes, log files and sockets, whose paths the kernel keeps short."""


class PartConfig(Section):
    """A plugin by name, with its options."""

    plugin: str
    """Name among the installed plugins of this kind (`asyncflow plugins` lists them)."""
    options: dict[str, Any] = {}
    """Options of the plugin, checked by the plugin's own model."""


class ServiceConfig(PartConfig):
    """A service that may run in a process of its own."""

    devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Accelerators the service sees, as CUDA_VISIBLE_DEVICES; empty: none is set. Rollout replicas
    get equal shares of them; trainer ranks all see all and take theirs by LOCAL_RANK."""
    python: InputPath = sys.executable
    """Interpreter of the service's process; it needs asyncflow-core and the plugin."""


LeasePolicyName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
"""Which ready rows go first: fifo; stalest_first, by the oldest version that produced them;
token_balanced, which evens the tokens that a task's workers hold; or a name that the data store
adds."""


class SamplingConfig(Section):
    """How responses are drawn."""

    max_new_tokens: int = Field(256, ge=1)
    """Most tokens of a response."""
    temperature: float = Field(1.0, ge=0.0)
    """Divides the logits; 0 is greedy."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Probability mass drawn from; 1 is off."""
    top_k: int = Field(0, ge=0)
    """Candidates drawn from; 0 is off."""
    min_p: float = Field(0.0, ge=0.0, lt=1.0)
    """Least share of the best candidate's probability; 0 is off."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Token ids that end a response, beside the tokenizer's end of sequence."""


class RolloutConfig(ServiceConfig):
    """The engine that generates."""

    replicas: int = Field(1, ge=1)
    """Processes, each with the whole model."""
    rows_in_flight: int = Field(256, ge=1)
    """Rows one replica holds at a time."""
    lease_policy: LeasePolicyName = "fifo"
    """Which prompts go first, among those of the oldest batch that may start."""
    sampling: SamplingConfig = SamplingConfig()
    """How responses are drawn, in training and evaluation."""
    timeout_s: float = Field(1800.0, ge=1)
    """Seconds in which a replica that holds rows may generate no token and finish no response. Then
    it is ended and started again, as often as `watchdog.restarts` allows, and its rows are
    generated again. Longer than its engine stands still to take weights or to start a server of its
    own again, and for an engine that counts tokens only when a response ends, longer than the
    longest response."""
    switch_mode: Literal["auto", "drain", "in_flight", "abort_resume"] = "auto"
    """When new weights start to serve. auto: in_flight with preset async, a max_staleness above 0
    and an engine that can, else drain."""


class TrainerConfig(ServiceConfig):
    """The engine that trains."""

    world_size: int = Field(1, ge=1)
    """Ranks, a process each."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Most tokens, prompts included, of one micro-batch of one rank; one row may exceed it."""
    lease_policy: LeasePolicyName = "fifo"
    """Which ready groups of a step's batch go first; all of it is trained in that step."""


class WeightSyncConfig(PartConfig):
    """How weights travel from trainer to rollout, and what is asked of every replica."""

    stage_timeout_s: float = Field(300.0, ge=1)
    """Seconds a replica has to take a version in; then it is ended and started again."""
    commit_timeout_s: float = Field(300.0, ge=1)
    """Seconds a replica has to switch; with switch mode drain it waits for its longest response."""
    attempts: int = Field(2, ge=1)
    """Times a replica may try to take one version in. What serves stays until one succeeds."""
    verify_every: int = Field(0, ge=0)
    """Compare what each replica serves with what was published, bit for bit, every so many
    versions; 0 for never. Checksums are verified at every version, whatever stands here."""


class ModelConfig(ServiceConfig):
    """A further model beside the one that is trained: a reference, a judge. It never changes."""

    kind: Literal["trainer", "rollout"] = "trainer"
    """trainer: gives log-probs of responses. rollout: answers prompts."""
    frozen: Literal[True] = True
    """Its weights stay; a plugin whose options have a `frozen` is told so."""
    world_size: int = Field(1, ge=1)
    """Ranks of one instance of a trainer, a process each."""
    sampling: SamplingConfig = SamplingConfig()
    """How a rollout's answers are drawn."""
    tokenizer: PartConfig | None = None
    """Between a rollout's ids and texts; default: the run's."""

    @model_validator(mode="after")
    def _of_its_kind(self) -> ModelConfig:
        without = ("sampling", "tokenizer") if self.kind == "trainer" else ("world_size",)
        given = [n for n in without if getattr(self, n) != type(self).model_fields[n].default]
        if given:
            raise ValueError(
                f"a model of kind {self.kind} takes no {', '.join(given)}: it would have no effect"
            )
        return self


class StageConfig(Section):
    """A step of the dataflow between rollout and trainer."""

    plugin: str = ""
    """Name of a stage plugin; or else `function`."""
    model: str = ""
    """Name under `models`; each worker of the stage has an instance of it, in a process of its own.
    Alone, with one of kind trainer: the stage writes the log-probs of responses, as `ref_logprobs`
    unless `writes` names another column. With one of kind rollout: `function` is called as
    `f(batch, model)`, and `model.generate(texts)` answers texts."""
    options: dict[str, Any] = {}
    """Options of the plugin."""
    function: FunctionName = ""
    """`module:name` of a function `f(batch) -> {column: values}`; it runs in worker processes."""
    kind: Literal["columns", "reward"] = "columns"
    """What `function` is. columns: on a batch. reward: on one row, its parameters named after
    columns, or `prompt` and `response` for their texts; it returns a number."""
    reads: tuple[str, ...] = ()
    """Columns a function reads; a plugin knows its own."""
    writes: tuple[str, ...] = ()
    """Columns a function writes."""
    whole_groups: bool = False
    """Whether a function needs all rows of a prompt group at once."""
    partitions: tuple[Literal["train", "eval"], ...] = ()
    """Rows a function works on; default: train and eval for a reward, else train."""
    workers: int = Field(1, ge=1)
    """Threads or processes that share the work."""
    rows: int = Field(64, ge=1)
    """Most rows of one call; a whole group may exceed it."""
    lease_policy: LeasePolicyName = "fifo"
    """Which ready rows go first: fifo; stalest_first, those of the oldest weights; token_balanced,
    which evens the tokens that the stage's workers hold."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds one call may take. In a process of its own (`module:name`) it is ended then, and
    rows that are to blame are given up: a reward's count 0, as if it had raised, others are
    dropped. A stage on a thread of the run cannot be ended: the run ends, and says so."""

    @model_validator(mode="after")
    def _one_source(self) -> StageConfig:
        if self.model and (self.plugin or self.kind == "reward"):
            raise ValueError("a stage with `model` is alone or has a `function` of kind columns")
        if bool(self.plugin) == bool(self.function) and not self.model:
            raise ValueError("a stage has either `plugin` or `function`, exactly one of them")
        if self.model and callable(self.function):
            raise ValueError(
                "a function with a `model` runs in the model's process; give it as module:name"
            )
        if self.function and self.kind == "columns" and not self.writes:
            raise ValueError("a stage by `function` says what it `reads` and `writes`")
        without: tuple[str, ...]
        if self.plugin:
            who, without = "by `plugin`", ("kind", "reads", "writes", "whole_groups", "partitions")
        elif self.model and not self.function:
            who, without = "by `model`", ("options", "kind", "reads", "whole_groups")
            if len(self.writes) > 1:
                raise ValueError(f"a model's log-probs are one column, not {list(self.writes)}")
        elif self.kind == "reward":
            who, without = "of kind reward", ("options", "writes", "whole_groups")
        else:
            who, without = "by `function`", ("options",)
        given = [n for n in without if getattr(self, n) != type(self).model_fields[n].default]
        if given:
            raise ValueError(f"a stage {who} takes no {', '.join(given)}: it would have no effect")
        return self


_BOUNDS = {"sequential": 0, "streaming": 0, "delayed": 1, "async": 1}
"""The `max_staleness` of each preset; of async, unless another is given."""


class WorkflowConfig(Section):
    """Steps, batches and how far rollout may run ahead."""

    preset: Literal["sequential", "streaming", "delayed", "async"] = "async"
    """What overlaps. sequential: nothing; one stage at a time works on a batch, and on all of it.
    streaming: tasks overlap within a step, on-policy. delayed: rollout is one step ahead; each
    replica takes new weights at its own boundary, when its running responses have ended. async:
    rollout is up to `max_staleness` ahead, and new weights serve from the next token where the
    engine can."""
    max_staleness: int | None = Field(None, ge=0)
    """Most completed steps between the oldest token of a trained row and the step that trains it.
    Default: 0 for sequential and streaming, 1 for delayed and async; only async takes another."""
    steps: int = Field(ge=1, lt=1 << 31)
    """Global batches to train."""
    groups_per_step: int = Field(ge=1)
    """Prompt groups of one global batch."""
    group_size: int = Field(ge=1)
    """Samples of one prompt."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer updates of one step, each on an equal share of its groups."""
    pacing: bool = True
    """Start prompts no earlier than keeps the trainer fed, so that staleness falls below its bound
    where rollout has room. Off: as soon as the bound allows."""
    order: Literal["batches", "ready_first"] = "batches"
    """What a step trains. batches: exactly the groups admitted to its batch, and it waits for all,
    so that lengths have the data's distribution. ready_first: the first groups that are ready,
    which leaves out what takes long; rows too old for the bound are treated by `too_stale`."""
    too_stale: Literal["requeue", "drop", "mask"] = "requeue"
    """With order ready_first, rows too old to be trained. requeue: their prompt is answered again.
    drop: they are dropped, and counted. mask: they count for the step and add nothing to it."""
    dynamic_sampling: bool = False
    """Throw away groups whose rewards are all equal, since they teach nothing, and refill their
    place in the batch with the next prompt."""
    extra_groups: int = Field(0, ge=0)
    """Groups that each batch starts beyond `groups_per_step`; the slowest as many are stopped and
    thrown away, so long responses are trained less than they should: biased."""

    @property
    def bound(self) -> int:
        """`max_staleness`, or the preset's own."""
        return _BOUNDS[self.preset] if self.max_staleness is None else self.max_staleness

    @model_validator(mode="after")
    def _divides(self) -> WorkflowConfig:
        if self.groups_per_step % self.updates_per_step:
            raise ValueError(
                f"groups_per_step {self.groups_per_step} does not divide into updates_per_step "
                f"{self.updates_per_step} equal shares; use a multiple of it"
            )
        own = _BOUNDS[self.preset]
        if self.preset != "async" and self.bound != own:
            raise ValueError(
                f"the {self.preset} preset trains at staleness {own}, max_staleness is "
                f"{self.bound}; leave it out, or use preset async"
            )
        self._check_policies()
        return self

    def _check_policies(self) -> None:
        if self.dynamic_sampling and self.group_size == 1:
            raise ValueError("dynamic_sampling compares the rewards of a group; group_size is 1")
        if self.order == "batches":
            if self.too_stale != "requeue":
                raise ValueError("too_stale has no effect with order batches; leave it out")
        elif self.preset != "async" or self.extra_groups or self.updates_per_step > 1:
            raise ValueError(
                f"order ready_first takes preset async, no extra_groups and updates_per_step 1; "
                f"got {self.preset}, {self.extra_groups} and {self.updates_per_step}"
            )


class EvaluationConfig(Section):
    """Held-out prompts, answered before the first step, after the last, and beside training."""

    every: int = Field(0, ge=0)
    """Versions from one evaluation beside training to the next; 0 for none."""
    share: float = Field(0.1, gt=0.0, le=1.0)
    """Of the rows in flight of all replicas, how many may be held-out ones beside training; one
    prompt's may always."""

    samples: int = Field(4, ge=1)
    """Responses a prompt."""
    limit: int = Field(1024, ge=1)
    """Most prompts."""
    success: float = 1.0
    """Least reward that counts as right."""


class WatchdogConfig(Section):
    """What is done about services that die, are stuck, or wait for each other."""

    stuck_s: float = Field(15.0, ge=1)
    """Seconds a process may give no sign of life before it is ended; a busy machine alone may take
    most of one. While it starts and loads its model the launcher's `start_timeout_s` holds
    instead."""
    restarts: int = Field(3, ge=0)
    """Times each rollout replica and each stage's worker may be started again within
    `restart_window_s`, and in a row while no row of the run is finished, however long that takes;
    one more death ends the run."""
    on_trainer_death: Literal["end", "resume"] = "end"
    """What a trainer that dies, any of its ranks, or is stuck does to the run. end: it ends, and
    `asyncflow run --resume` goes on with it. resume: all processes are ended and the run goes on
    from its newest checkpoint by itself, as often as `restarts` allows."""
    restart_window_s: float = Field(600.0, gt=0)
    """Seconds after which a death is forgotten."""
    idle_s: float = Field(3600.0, ge=1)
    """Seconds in which no row is finished, no step done, no process started and no weights are
    taken, after which the run ends and says who waits for whom."""


class CheckpointConfig(Section):
    """Saving a run, so that `asyncflow run --resume` goes on with it, whatever ended it."""

    every: int = Field(0, ge=0)
    """Steps from one checkpoint to the next; the last step makes one, too. 0 for none."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    resume: Literal["reuse", "exact"] = "reuse"
    """What a resumed run does with rows that are not trained. reuse: a durable data store gives
    back those whose tokens are all of the checkpoint's version or older; the others are generated
    again. exact: all are generated again, as if the run had just come to the checkpoint."""


class RunConfig(Section):
    """One run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Folder of the run inside `out`."""
    out: str = "runs"
    """Folder of runs, relative to where the command is started."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seeds prompts and sampling."""
    model: InputPath | None = None
    """Model directory; given to every plugin whose options have a `model` left out."""
    tokenizer: PartConfig = PartConfig(plugin="huggingface")
    """Text to ids, for prompts and rewards."""
    prompts: PartConfig
    """Where prompts come from."""
    rollout: RolloutConfig
    """The engine that generates."""
    trainer: TrainerConfig
    """The engine that trains."""
    loss: PartConfig
    """What the trainer minimises."""
    models: dict[StageName, ModelConfig] = {}
    """Further models, by name; stages use them."""
    stages: dict[StageName, StageConfig]
    """Rewards, advantages and whatever else lies between rollout and trainer, by name."""
    workflow: WorkflowConfig
    """Steps, batches, staleness."""
    evaluation: EvaluationConfig | None = EvaluationConfig()
    """Held-out evaluation; null for none."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run is saved, and how a resumed one goes on."""
    watchdog: WatchdogConfig = WatchdogConfig()
    """Restarts, and how long silence is borne."""
    data_store: PartConfig = PartConfig(plugin="memory")
    """The table through which samples stream."""
    weight_sync: WeightSyncConfig = WeightSyncConfig(plugin="host")
    """How weights travel from trainer to rollout."""
    launcher: PartConfig = PartConfig(plugin="local")
    """How processes are started."""

    @model_validator(mode="before")
    @classmethod
    def _default_plugins(cls, values: Any) -> Any:
        return with_default_plugins(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _staleness_allows_switch(self) -> RunConfig:
        if self.workflow.bound == 0 and self.rollout.switch_mode in ("in_flight", "abort_resume"):
            raise ValueError(
                f"rollout.switch_mode {self.rollout.switch_mode} mixes versions within a response, "
                f"which max_staleness 0 forbids; use drain or auto, or max_staleness >= 1"
            )
        if self.watchdog.on_trainer_death == "resume" and not self.checkpoint.every:
            raise ValueError(
                "watchdog.on_trainer_death resume goes on from a checkpoint, and none is made; set "
                "checkpoint.every, or use end"
            )
        if self.workflow.order != "batches" and self.checkpoint.every:
            raise ValueError(
                "order ready_first cannot be resumed: leave checkpoint.every out, or use order "
                "batches"
            )
        reserved = {"rollout", "proximal", "filter", "train", "trainer", "record"} & set(
            self.stages
        )
        if reserved:
            raise ValueError(
                f"stage names {sorted(reserved)} are taken by the flow's own tasks and processes"
            )
        used = {stage.model for stage in self.stages.values()} - {""}
        idle = sorted(set(self.models) - used)
        if idle:
            raise ValueError(f"no stage uses the models {idle}; name them in a stage, or leave out")
        return self


def with_default_plugins(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections that say something but not their plugin, and have a default one, get it."""
    filled = dict(values)
    for name, field in RunConfig.model_fields.items():
        given = values.get(name)
        if isinstance(field.default, PartConfig) and isinstance(given, Mapping):
            filled[name] = {"plugin": field.default.plugin, **given}
    return filled
