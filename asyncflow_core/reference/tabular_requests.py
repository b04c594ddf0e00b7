"""Requests of the tabular rollout: what is refused, and how one grows token by token."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import numpy as np

from asyncflow_core.errors import AsyncFlowError, DataError, UnsupportedCapabilityError
from asyncflow_core.reference.tabular import TabularModel
from asyncflow_core.services.rollout import Completion, GenerateRequest

__all__ = ["TabularSequence", "check_request"]


@dataclass(slots=True, eq=False)
class TabularSequence:
    """A request on its way; `results` is the queue of the call that made it."""

    request: GenerateRequest
    results: asyncio.Queue[Completion | AsyncFlowError]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        prefix = self.request.prefix
        if prefix is not None:
            self.tokens = prefix.response_ids.tolist()
            self.logprobs = prefix.behaviour_logprobs.tolist()
            self.runs = prefix.versions.reshape(-1, 2).tolist()

    def append(self, token: int, logprob: float, version: int) -> None:
        """Take the next token."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if not self.runs or self.runs[-1][0] != version:
            self.runs.append([version, 0])
        self.runs[-1][1] += 1

    def finish(self, reason: str) -> None:
        """Hand the completion to whoever waits for it."""
        completion = Completion(
            key=self.request.key,
            response_ids=np.array(self.tokens, np.int32),
            behaviour_logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.runs, np.int32).reshape(-1, 2),
            finish_reason=reason,
        )
        self.results.put_nowait(completion)


def check_request(request: GenerateRequest, model: TabularModel) -> None:
    """Refuse what the engine cannot do, naming the request.

    Raises:
        DataError: a value out of range, or a prefix that is not of this request.
        UnsupportedCapabilityError: stop strings.
    """
    sampling, where = request.sampling, f"request {request.key}"
    if sampling.stop:
        raise UnsupportedCapabilityError(f"{where}: the tabular rollout knows no stop strings")
    if not len(request.prompt_ids):
        raise DataError(f"{where}: the prompt is empty")
    model.check_ids(request.prompt_ids, f"{where}: the prompt")
    for name, value, low, high in (
        ("max_new_tokens", sampling.max_new_tokens, 1, math.inf),
        ("temperature", sampling.temperature, 0, math.inf),
        ("top_p", sampling.top_p, 0, 1),
        ("top_k", sampling.top_k, 0, math.inf),
        ("min_p", sampling.min_p, 0, 1),
    ):
        if not (low <= value <= high and math.isfinite(value)):
            raise DataError(f"{where}: {name} is {value}, allowed are {low} to {high}")
    prefix = request.prefix
    if prefix is None:
        return
    model.check_ids(prefix.response_ids, f"{where}: the prefix")
    counts = (
        len(prefix.response_ids),
        len(prefix.behaviour_logprobs),
        int(prefix.versions.reshape(-1, 2)[:, 1].sum()),
    )
    if prefix.key != request.key or len(set(counts)) != 1:
        raise DataError(
            f"{where}: the prefix is of {prefix.key} and has {counts[0]} tokens, {counts[1]} "
            f"log-probs and versions of {counts[2]}; they must agree"
        )
