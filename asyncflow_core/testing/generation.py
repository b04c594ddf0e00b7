"""Requests, weights and expected log-probs, for tests of a rollout on a real model; numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncflow_core.batch import Key
from asyncflow_core.services.rollout import GenerateRequest, Rollout, SamplingParams, SwitchMode
from asyncflow_core.services.weight_sync import Bucket, TensorSpec, WeightSource
from asyncflow_core.testing.aio import manifest_of, stream

__all__ = ["float32_buckets", "make_requests", "make_source", "response_logprobs", "switch_to"]


def make_requests(
    count: int, *, prompt: Sequence[int], first: int = 0, **sampling: Any
) -> list[GenerateRequest]:
    """Requests with one prompt, samples `first`, `first + 1`, ... of one group.

    Args:
        count: how many.
        prompt: token ids.
        first: sample of the first.
        **sampling: fields of `SamplingParams`; `max_new_tokens` is 8 unless given.
    """
    params = SamplingParams(**{"max_new_tokens": 8, **sampling})
    ids = np.array(prompt, np.int32)
    return [
        GenerateRequest(Key(0, 0, 0, sample), ids, params, 100 + sample)
        for sample in range(first, first + count)
    ]


def float32_buckets(
    tensors: Mapping[str, NDArray[np.float32]],
    *,
    aliases: Mapping[str, tuple[str, ...]],
    per_bucket: int = 5,
) -> list[Bucket]:
    """Copies of tensors, as a trainer yields them.

    Args:
        tensors: by name.
        aliases: further names of tied ones.
        per_bucket: most tensors in one bucket.
    """
    names, buckets = list(tensors), []
    for start in range(0, len(names), per_bucket):
        specs, offset = [], 0
        part = names[start : start + per_bucket]
        for name in part:
            spec = TensorSpec(name, "F32", tensors[name].shape, offset, aliases.get(name, ()))
            specs.append(spec)
            offset += spec.nbytes
        data = [np.ascontiguousarray(tensors[name], np.float32).reshape(-1) for name in part]
        buckets.append(Bucket(tuple(specs), np.concatenate(data).view(np.uint8)))
    return buckets


def make_source(buckets: Sequence[Bucket], version: int) -> WeightSource:
    """A version as a transport gives it to a replica."""
    return WeightSource(manifest_of(buckets, version), buckets=stream(buckets))


async def switch_to(
    service: Rollout, buckets: Sequence[Bucket], version: int, mode: SwitchMode
) -> None:
    """Stage and commit."""
    await service.stage_weights(make_source(buckets, version))
    await service.commit_weights(version, mode)


def response_logprobs(
    logits: ArrayLike, response: Sequence[int], *, temperature: float = 1.0
) -> NDArray[np.float64]:
    """Log-probs of a response's T tokens, by the schema's definition; [T].

    Args:
        logits: of the positions before each of them, whole vocabulary; [T, V].
        response: its ids.
        temperature: of the draw.
    """
    scaled = np.asarray(logits, np.float64) / temperature
    scaled = scaled - scaled.max(-1, keepdims=True)
    every = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    found: NDArray[np.float64] = every[np.arange(len(every)), np.asarray(response, np.int64)]
    return found
