"""What goes into the generation engine and what comes out, and what is refused.

Shapes: P prompt tokens, R prefix tokens, T response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

__all__ = [
    "EngineCompletion",
    "EngineRequest",
    "FinishReason",
    "check_request",
    "unstarted",
    "version_runs",
]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, eq=False)
class EngineRequest:
    """One sequence to generate.

    A partial response is continued by giving it as the prefix: token indices, limits and stop
    sequences count from the response's start, so a resumed run draws what a straight one would.
    """

    key: Hashable
    """Names the request; unique among those waiting and running."""
    prompt_ids: NDArray[np.int32]
    """int32 [P], not empty."""
    seed: int
    """0 <= seed < 2**64."""
    max_new_tokens: int
    """Largest response length, prefix included."""
    temperature: float = 1.0
    """0 is greedy (log-probs are then those at temperature 1)."""
    top_p: float = 1.0
    """1 is off."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """End the response, beside the engine's eos_token_ids; the token is kept."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """End the response when it ends with one of them; the tokens are kept."""
    prefix_ids: NDArray[np.int32] | None = None
    """int32 [R] response tokens to continue from."""
    prefix_logprobs: NDArray[np.float32] | None = None
    """float32 [R], required with prefix_ids."""
    prefix_versions: NDArray[np.int32] | None = None
    """int32 [runs, 2] of (version, count) with counts summing to R, required with prefix_ids."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineCompletion:
    """A finished or aborted response, prefix included."""

    key: Hashable
    response_ids: NDArray[np.int32]
    """int32 [T]; the token that stopped it is the last one."""
    logprobs: NDArray[np.float32]
    """float32 [T]: log softmax(logits / temperature) over the whole vocabulary."""
    versions: NDArray[np.int32]
    """int32 [runs, 2] of (version, count), counts summing to T."""
    finish_reason: FinishReason


def version_runs(versions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Run-length encode one version a token as (version, count) rows.

    Shapes: versions [T]; result int32 [runs, 2].
    """
    if not versions.size:
        return np.empty((0, 2), np.int32)
    changes = np.flatnonzero(versions[1:] != versions[:-1]) + 1
    bounds = np.concatenate([[0], changes, [versions.size]])
    return np.stack([versions[bounds[:-1]], bounds[1:] - bounds[:-1]], axis=1).astype(np.int32)


def unstarted(request: EngineRequest) -> EngineCompletion:
    """Return the aborted partial of a request that never ran: its prefix, or nothing."""
    versions = np.empty((0, 2), np.int32)
    if request.prefix_versions is not None:
        # Encoded anew, so that runs come out merged as those of a request that ran.
        version, count = request.prefix_versions.T
        versions = version_runs(np.repeat(version, count))
    ids, logprobs = request.prefix_ids, request.prefix_logprobs
    return EngineCompletion(
        key=request.key,
        response_ids=np.array([] if ids is None else ids, np.int32),
        logprobs=np.array([] if logprobs is None else logprobs, np.float32),
        versions=versions,
        finish_reason="abort",
    )


def check_request(request: EngineRequest, *, max_length: int, vocab_size: int) -> None:
    """Refuse a request the engine cannot serve.

    Args:
        request: the request.
        max_length: tokens a slot holds.
        vocab_size: token ids lie in [0, vocab_size).

    Raises:
        ValueError: naming the request's key, the value and what is allowed.
    """
    _check_tokens(request, vocab_size)
    _check_lengths(request, max_length)
    _check_prefix(request)
    _check_sampling(request)


def _refuse(request: EngineRequest, what: str) -> ValueError:
    return ValueError(f"request {request.key!r}: {what}")


def _check_tokens(request: EngineRequest, vocab_size: int) -> None:
    for name in ("prompt_ids", "prefix_ids"):
        ids = getattr(request, name)
        if ids is None and name == "prefix_ids":
            continue
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
            got = f"{ids.dtype} {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
            raise _refuse(request, f"{name} must be a 1-D integer numpy array, got {got}")
        bad = ids[(ids < 0) | (ids >= vocab_size)]
        if bad.size:
            raise _refuse(request, f"{name} holds token {bad[0]}, allowed: 0..{vocab_size - 1}")
    for ids in (request.stop_token_ids, *request.stop_sequences):
        for token in ids:
            if not 0 <= token < vocab_size:
                allowed = f"allowed: 0..{vocab_size - 1}"
                raise _refuse(request, f"stop tokens hold token {token}, {allowed}")
    if any(not sequence for sequence in request.stop_sequences):
        raise _refuse(request, "stop_sequences holds an empty sequence, allowed: 1 token or more")


def _check_lengths(request: EngineRequest, max_length: int) -> None:
    prompt, new = request.prompt_ids.size, request.max_new_tokens
    if prompt == 0:
        raise _refuse(request, "prompt_ids is empty, allowed: 1 token or more")
    if new < 1:
        raise _refuse(request, f"max_new_tokens is {new}, allowed: 1 or more")
    if prompt + new > max_length:
        raise _refuse(
            request,
            f"prompt of {prompt} tokens + max_new_tokens {new} is {prompt + new}, allowed: at most "
            f"the engine's max_length {max_length}",
        )


def _check_prefix(request: EngineRequest) -> None:
    logprobs, versions = request.prefix_logprobs, request.prefix_versions
    if request.prefix_ids is None:
        if logprobs is not None or versions is not None:
            raise _refuse(request, "prefix_logprobs or prefix_versions given without prefix_ids")
        return
    size = request.prefix_ids.size
    if size >= request.max_new_tokens:
        raise _refuse(
            request,
            f"prefix_ids has {size} tokens, allowed: fewer than max_new_tokens "
            f"{request.max_new_tokens}, which counts them",
        )
    if logprobs is None or logprobs.shape != (size,):
        got = None if logprobs is None else logprobs.shape
        raise _refuse(request, f"prefix_logprobs has shape {got}, allowed: ({size},)")
    if versions is None or versions.ndim != 2 or versions.shape[1] != 2:
        got = None if versions is None else versions.shape
        raise _refuse(request, f"prefix_versions has shape {got}, allowed: (runs, 2)")
    if versions.size and versions.min() < 0:
        raise _refuse(request, f"prefix_versions holds {versions.min()}, allowed: 0 or more")
    total = int(versions[:, 1].sum())
    if total != size:
        raise _refuse(request, f"prefix_versions counts {total} tokens, prefix_ids has {size}")


def _check_sampling(request: EngineRequest) -> None:
    if not 0 <= request.seed < 2**64:
        raise _refuse(request, f"seed is {request.seed}, allowed: 0 <= seed < 2**64")
    temperature = request.temperature
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise _refuse(request, f"temperature is {temperature}, allowed: 0 (greedy) or more, finite")
    # Below this, logits / temperature overflows float32 and the log-probs turn NaN.
    if 0.0 < temperature < 1e-4:
        raise _refuse(request, f"temperature is {temperature}, allowed: 0 (greedy) or >= 1e-4")
    if not 0.0 < request.top_p <= 1.0:
        raise _refuse(request, f"top_p is {request.top_p}, allowed: 0 < top_p <= 1 (1 is off)")
    if request.top_k < 0:
        raise _refuse(request, f"top_k is {request.top_k}, allowed: 0 (off) or more")
    if not 0.0 <= request.min_p <= 1.0:
        raise _refuse(request, f"min_p is {request.min_p}, allowed: 0 (off) <= min_p <= 1")
