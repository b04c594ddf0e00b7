"""What a stage does with a model of its own: log-probs of responses, or answers to texts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import Batch, Key
from asyncflow_core.errors import DataError, InvariantError
from asyncflow_core.flow.working.fanout import Ranks
from asyncflow_core.flow.working.work import sampling_seed
from asyncflow_core.flow.working.worker import Part, Work
from asyncflow_core.parts import Stage, StageContract, Tokenizer, encode_prompt
from asyncflow_core.services.data_store import Lease
from asyncflow_core.services.rollout import Completion, GenerateRequest, Rollout, SamplingParams

__all__ = ["StageModel", "logprobs_work", "with_model"]


def logprobs_work(ranks: Ranks, contract: StageContract) -> Work:
    """The log-probs of the leased responses, computed by all ranks of a frozen trainer.

    Each rank reads its rows itself.
    """
    (column,) = contract.writes

    async def work(lease: Lease, batch: Batch) -> AsyncGenerator[Part, None]:
        del batch
        tokens = [info.tokens for info in lease.rows]
        found = await ranks.forward([lease.ref()], tokens, contract.reads)
        yield Part(lease.rows, Batch({column: found["logprobs"]}))

    return work


class StageModel:
    """A rollout as a stage's function sees it: called from the stage's thread, it blocks.

    Concurrency: several calls, from several threads, run side by side in the engine.
    """

    def __init__(
        self,
        service: Rollout,
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
        seed: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Take an opened service and the loop it lives on; `seed` of the run."""
        self._service = service
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._seed = seed
        self._loop = loop
        self._calls = itertools.count()

    def generate(self, prompts: Sequence[str | Sequence[Mapping[str, str]]]) -> list[str]:
        """Answers to prompts, texts or chat messages, in their order.

        The seeds of a call follow from its number in this process: at a temperature above 0 a run
        that is repeated may draw other answers.

        Raises:
            DataError: a prompt the engine cannot take, or no tokenizer.
            EngineError: the engine failed.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise DataError("texts need a tokenizer; give the run, or the model, one")
        ids = [np.array(encode_prompt(tokenizer, prompt), np.int32) for prompt in prompts]
        return [tokenizer.decode(answer) for answer in self.generate_ids(ids)]

    def generate_ids(self, prompts: Sequence[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
        """As `generate`, from token ids to token ids."""
        number = next(self._calls)
        keys = [Key(0, 0, number, sample) for sample in range(len(prompts))]
        requests = [
            GenerateRequest(key, ids, self._sampling, sampling_seed(self._seed, key))
            for key, ids in zip(keys, prompts, strict=True)
        ]
        found = asyncio.run_coroutine_threadsafe(self._collect(requests), self._loop).result()
        if found.keys() != set(keys):
            raise InvariantError(
                f"the model answered {len(found.keys() & set(keys))} of {len(keys)} requests and "
                f"{len(found.keys() - set(keys))} that were not made; generate() yields one "
                f"completion for each"
            )
        return [found[key].response_ids for key in keys]

    async def _collect(self, requests: Sequence[GenerateRequest]) -> dict[Key, Completion]:
        return {made.key: made async for made in self._service.generate(requests)}


def with_model(function: Callable[..., Any], model: StageModel) -> Stage:
    """`function(batch, model)` as a stage."""

    def stage(batch: Batch) -> Mapping[str, Any]:
        found: Mapping[str, Any] = function(batch, model)
        return found

    return stage
