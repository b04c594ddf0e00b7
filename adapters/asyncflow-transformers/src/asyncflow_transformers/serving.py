"""A request on its way through the engine, and the engine as the service sees it."""

from __future__ import annotations

from asyncio import Queue
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import Key
from asyncflow_core.errors import AsyncFlowError
from asyncflow_core.services.rollout import Completion, GenerateRequest
from asyncflow_transformers.engine import GenerationEngine
from asyncflow_transformers.requests import EngineCompletion, EngineRequest
from asyncflow_transformers.stops import StopStrings

__all__ = ["Outbox", "ServedEngine", "Ticket"]

Outbox: TypeAlias = "Queue[tuple[Ticket, Completion | AsyncFlowError]]"
"""Where a `generate` call waits for its results."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request.

    The engine knows it by this object and not by its key, since a row may be asked for twice at
    once: a worker that lost its lease has not stopped yet.
    """

    key: Key
    outbox: Outbox
    request: EngineRequest = field(init=False)
    stops: StopStrings | None = None

    @classmethod
    def of(cls, request: GenerateRequest, outbox: Outbox, stops: StopStrings | None) -> Ticket:
        """A ticket for a request, not yet checked."""
        ticket, sampling, prefix = cls(request.key, outbox, stops), request.sampling, request.prefix
        ticket.request = EngineRequest(
            key=ticket,
            prompt_ids=request.prompt_ids,
            seed=request.seed,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_token_ids=sampling.stop_token_ids,
            prefix_ids=None if prefix is None else prefix.response_ids,
            prefix_logprobs=None if prefix is None else prefix.behaviour_logprobs,
            prefix_versions=None if prefix is None else prefix.versions,
        )
        return ticket

    def __repr__(self) -> str:
        """The key, as the engine's errors name it."""
        return str(self.key)

    def completion(self, result: EngineCompletion, finish_reason: str | None = None) -> Completion:
        """What the engine made of it."""
        return Completion(
            self.key,
            result.response_ids,
            result.logprobs,
            result.versions,
            finish_reason or result.finish_reason,
        )


class ServedEngine(GenerationEngine):
    """The engine, with a view of its limits and of what running sequences have so far."""

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and response."""
        return self._max_length

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._vocab_size

    def response_so_far(self, ticket: Ticket) -> NDArray[np.int64]:
        """The tokens of a running sequence's response, a view valid until the next step."""
        row = self._rows[ticket]
        start = ticket.request.prompt_ids.size
        return self._table.tokens[row, start : self._table.length[row]]
