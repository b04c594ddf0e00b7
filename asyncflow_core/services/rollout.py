"""Rollout: an engine that continues prompts, and takes new weights while it does.

`docs/spec/rollout.md` numbers what every implementation must hold (RO-n).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import Batch, Column, Key
from asyncflow_core.errors import DataError
from asyncflow_core.services.base import Service
from asyncflow_core.services.weight_sync import Bucket, TensorSpec, WeightSource

__all__ = [
    "Completion",
    "GenerateRequest",
    "Rollout",
    "RolloutCapabilities",
    "RolloutStats",
    "SamplingParams",
    "StagedWeights",
    "SupportsPause",
    "SupportsReadback",
    "SwitchMode",
    "completions_to_batch",
]


class SwitchMode(StrEnum):
    """When staged weights start to serve.

    DRAIN: when every running sequence has ended; new ones wait.
    IN_FLIGHT: at the next token; running sequences go on, their tokens carry both versions.
    ABORT_RESUME: now; running sequences are cut, kept, and continued under the new weights.
    """

    DRAIN = "drain"
    IN_FLIGHT = "in_flight"
    ABORT_RESUME = "abort_resume"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        max_new_tokens: most response tokens.
        temperature: 0 is greedy, with the log-probs of temperature 1.
        top_p: nucleus mass, 1 off. top_k: candidates, 0 off. min_p: share of the best, 0 off.
        stop: strings that end a response; they stay in it.
        stop_token_ids: further ids that end a response, beside the model's end of sequence.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    @property
    def truncates(self) -> bool:
        """Whether the draw is from less than the whole vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @classmethod
    def from_row(cls, entry: Mapping[str, Any]) -> SamplingParams:
        """From an entry of the `sampling` column; `DataError` for a field there is not."""
        unknown = sorted(entry.keys() - {item.name for item in fields(cls)})
        if unknown:
            raise DataError(f"column 'sampling' has the fields {unknown}; see SamplingParams")
        lists = {name: tuple(value) for name, value in entry.items() if isinstance(value, list)}
        return cls(**{**entry, **lists})


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """One trajectory to sample.

    Attributes:
        key: its row.
        prompt_ids: int32 [P], P >= 1.
        sampling: how to draw.
        seed: of this trajectory; the same seed, prompt and weights draw the same tokens.
        prefix: a partial response to go on from, None to start.
    """

    key: Key
    prompt_ids: NDArray[np.int32]
    sampling: SamplingParams
    seed: int
    prefix: Completion | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What was sampled; T response tokens, R runs of equal version.

    Attributes:
        key: its row.
        response_ids: int32 [T], with the ending token where there is one.
        behaviour_logprobs: float32 [T], by the schema's definition.
        versions: int32 [R, 2], (version, count).
        finish_reason: "stop", "length" or "abort".
    """

    key: Key
    response_ids: NDArray[np.int32]
    behaviour_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: str


def completions_to_batch(completions: Sequence[Completion], sampling: SamplingParams) -> Batch:
    """The canonical columns a rollout writes, a row a completion; every token is trained."""
    return Batch(
        {
            "response_ids": Column.ragged([c.response_ids for c in completions], np.int32),
            "behaviour_logprobs": Column.ragged(
                [c.behaviour_logprobs for c in completions], np.float32
            ),
            "loss_mask": Column.ragged(
                [np.ones(len(c.response_ids), np.uint8) for c in completions], np.uint8
            ),
            "versions": Column.ragged(
                [c.versions.reshape(-1, 2) for c in completions] or [np.empty((0, 2), np.int32)],
                np.int32,
            ),
            "finish_reason": Column.objects(c.finish_reason for c in completions),
            "sampling": Column.objects(_sampling_row(sampling) for _ in completions),
        }
    )


def _sampling_row(sampling: SamplingParams) -> dict[str, Any]:
    row = asdict(sampling)
    row["stop"], row["stop_token_ids"] = list(sampling.stop), list(sampling.stop_token_ids)
    return row


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """What a replica holds ready: proof that it is what was published.

    Attributes:
        version: as published.
        checksum: over what is really in the replica, as `WeightManifest.checksum`.
        nbytes: bytes staged. wall_s: seconds it took.
    """

    version: int
    checksum: str
    nbytes: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Load and work of one replica.

    Attributes:
        version: weights that serve now.
        running: sequences being decoded. waiting: requests not yet started.
        tokens_generated: response tokens since open. busy_s: seconds the engine worked.
        tokens_kept: tokens of running sequences that lived through a switch.
        tokens_lost: tokens thrown away by switches and aborts.
        tokens_unfinished: tokens of responses that have not ended; counted by core.
    """

    version: int = 0
    running: int = 0
    waiting: int = 0
    tokens_generated: int = 0
    busy_s: float = 0.0
    tokens_kept: int = 0
    tokens_lost: int = 0
    tokens_unfinished: int = 0


@dataclass(frozen=True, slots=True)
class RolloutCapabilities:
    """What an engine can do beyond the minimum.

    Attributes:
        switch_modes: how it can take new weights.
        weight_sources: which sources it takes in ("buckets", "path", "collective").
        sampling: SamplingParams fields it honours.
        prefix: it goes on from a partial response.
        seeds: equal seeds repeat.
        pause: it is a `SupportsPause`.
        readback: it is a `SupportsReadback`.
        max_tokens: most tokens of a prompt with its response; None where that is known only once
            the engine runs.
    """

    switch_modes: frozenset[SwitchMode] = frozenset({SwitchMode.DRAIN})
    weight_sources: frozenset[str] = frozenset({"buckets"})
    sampling: frozenset[str] = frozenset({"max_new_tokens", "temperature"})
    prefix: bool = False
    seeds: bool = True
    pause: bool = False
    readback: bool = False
    max_tokens: int | None = None


class Rollout(Service):
    """One replica of an engine. It owns the model's memory and the requests it was given.

    It never sees the store: a worker leases rows, makes requests, and commits completions.
    Versions are given to it; it stamps every token with the one that produced it.
    """

    API_VERSION: ClassVar[int] = 1

    @abstractmethod
    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Sample all requests; yields each completion when it ends, in any order.

        Calls may overlap; the engine batches over all of them. Closing the iterator early aborts
        what it has not yielded.

        Raises:
            DataError: a request the engine cannot take, named by its key; none is started.
            EngineError: the engine failed.
        """

    @abstractmethod
    async def stage_weights(self, source: WeightSource) -> StagedWeights:
        """Take in a version beside the one that serves, while generating; nothing switches yet.

        Staging again replaces what was staged. After an error what serves is untouched.

        Raises:
            DataError: names, shapes or dtypes do not fit the model; the first difference is named.
        """

    @abstractmethod
    async def commit_weights(self, version: int, mode: SwitchMode) -> None:
        """Let the staged version serve; returns when every later token is of it.

        Raises:
            UnsupportedCapabilityError: an undeclared mode.
            ServiceError: `version` is not what is staged.
        """

    @abstractmethod
    async def abort(self, keys: Sequence[Key] | None = None) -> int:
        """End running requests (default all) with what they have, as finish reason "abort"."""

    @abstractmethod
    async def stats(self) -> RolloutStats:
        """Load and work."""


@runtime_checkable
class SupportsPause(Protocol):
    """An engine that can stand still with its sequences kept."""

    async def pause(self) -> None:
        """Stop producing tokens at the next token boundary."""

    async def resume(self) -> None:
        """Go on."""


@runtime_checkable
class SupportsReadback(Protocol):
    """An engine that gives the weights back which it serves."""

    def read_weights(self, tensors: Sequence[TensorSpec]) -> AsyncIterator[Bucket]:
        """These tensors in this order, as they serve now, in the published names and dtypes.

        A bucket's buffer may be used again after the next one is asked for.
        """
        ...
