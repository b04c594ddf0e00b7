"""One request from first to last token, over as many servers and versions as it takes. Pure.

Shapes: P prompt tokens, T response tokens, R runs of equal version.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow_core.errors import DataError
from asyncflow_core.services.rollout import Completion, GenerateRequest

__all__ = ["Limits", "Trajectory", "check_request", "vocabulary"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What every server can take.

    Attributes:
        vocab: ids are below this. One that is not would end the server, not the request.
        tokens: of prompt and response together, so that a partial response can always go on.
        stop_strings: whether servers have a tokenizer.
    """

    vocab: int
    tokens: int
    stop_strings: bool = True


def vocabulary(model: str) -> int:
    """Size of the vocabulary, from the model's config.json.

    Raises:
        DataError: it does not say, or is not there.
    """
    try:
        config: Mapping[str, Any] = json.loads((Path(model) / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"model {model!r} has no sound config.json ({error}); give the path of a Hugging Face "
            f"model"
        ) from error
    for part in (config, config.get("text_config") or {}):
        if isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    raise DataError(f"{model}/config.json has no vocab_size, which prompts are checked against")


def check_request(request: GenerateRequest, limits: Limits) -> None:
    """`DataError`, with the request's key, for what a server could not serve."""
    wrong = _wrong_tokens(request, limits) or _wrong_sampling(request, limits)
    if wrong:
        raise DataError(f"request {request.key}: {wrong}")


def _wrong_tokens(request: GenerateRequest, limits: Limits) -> str:
    prompt, prefix, longest = request.prompt_ids, request.prefix, request.sampling.max_new_tokens
    if not len(prompt):
        return "prompt_ids is empty, allowed: 1 token or more"
    parts = {"prompt_ids": prompt, "stop_token_ids": np.array(request.sampling.stop_token_ids)}
    if prefix is not None:
        parts["prefix"] = prefix.response_ids
    for name, ids in parts.items():
        bad = [int(i) for i in ids if not 0 <= i < limits.vocab]
        if bad:
            return f"{name} holds token {bad[0]}, allowed: 0..{limits.vocab - 1}"
    if longest < 1:
        return f"max_new_tokens is {longest}, allowed: 1 or more"
    if len(prompt) + longest > limits.tokens:
        return (
            f"prompt of {len(prompt)} tokens + max_new_tokens {longest} is "
            f"{len(prompt) + longest}, allowed: at most {limits.tokens} on these servers"
        )
    return "" if prefix is None else _wrong_prefix(prefix, longest)


def _wrong_prefix(prefix: Completion, longest: int) -> str:
    size = len(prefix.response_ids)
    if size >= longest:
        return (
            f"its prefix has {size} tokens, allowed: fewer than max_new_tokens {longest}, "
            f"which counts them"
        )
    counted = int(prefix.versions.reshape(-1, 2)[:, 1].sum())
    if not len(prefix.behaviour_logprobs) == size == counted:
        return (
            f"its prefix has {size} tokens, {len(prefix.behaviour_logprobs)} log-probs and "
            f"versions of {counted}"
        )
    return ""


def _wrong_sampling(request: GenerateRequest, limits: Limits) -> str:
    sampling = request.sampling
    faults = {
        f"temperature is {sampling.temperature}, allowed: 0 (greedy) or more": (
            not 0.0 <= sampling.temperature < float("inf")
        ),
        f"top_p is {sampling.top_p}, allowed: 0 < top_p <= 1 (1 is off)": (
            not 0.0 < sampling.top_p <= 1.0
        ),
        f"top_k is {sampling.top_k}, allowed: 0 (off) or more": sampling.top_k < 0,
        # Servers take top_k 1 for greedy, with the log-probs of temperature 1.
        f"top_k is 1 at temperature {sampling.temperature}, allowed: 1; temperature 0 is greedy": (
            sampling.top_k == 1 and sampling.temperature not in (0.0, 1.0)
        ),
        f"min_p is {sampling.min_p}, allowed: 0 (off) <= min_p <= 1": (
            not 0.0 <= sampling.min_p <= 1.0
        ),
        "stop strings need a tokenizer, which skip_tokenizer_init leaves out; use stop_token_ids": (
            bool(sampling.stop) and not limits.stop_strings
        ),
    }
    return next((fault for fault, found in faults.items() if found), "")


@dataclass(slots=True, eq=False)
class Trajectory:
    """A request and its tokens so far.

    Attributes:
        request: as given.
        ends: further ids that end a response: the run's tokenizer's.
        ids: response tokens. logprobs: theirs. runs: [version, count] over them.
        aborted: it is to end with what it has.
    """

    request: GenerateRequest
    ends: tuple[int, ...] = ()
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)
    aborted: bool = False

    def __post_init__(self) -> None:
        prefix = self.request.prefix
        if prefix is not None:
            runs = [(int(v), int(n)) for v, n in prefix.versions.reshape(-1, 2)]
            self.extend(prefix.response_ids.tolist(), prefix.behaviour_logprobs.tolist(), runs)

    def extend(
        self, ids: Iterable[int], logprobs: Iterable[float], runs: Iterable[tuple[int, int]]
    ) -> None:
        """Add tokens, their log-probs and (version, count) runs."""
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        for version, count in runs:
            if self.runs and self.runs[-1][0] == version:
                self.runs[-1][1] += count
            elif count:
                self.runs.append([version, count])

    @property
    def left(self) -> int:
        """Tokens it may still get."""
        return self.request.sampling.max_new_tokens - len(self.ids)

    @property
    def kept(self) -> int:
        """Tokens that lived through a switch, counted at each."""
        counts = np.array([count for _, count in self.runs], np.int64)
        return int(counts[:-1].cumsum().sum())

    def body(self, rid: str, label: str, *, seeds: bool, interval: int) -> dict[str, Any]:
        """What is posted to /generate to go on.

        Args:
            rid: of this attempt. Servers match ids by prefix, so all have one length.
            label: of the weights that serve; it keeps prefixes cached under other weights apart.
            seeds: whether the server draws by seed.
            interval: tokens between two chunks.
        """
        sampling = self.request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": self.left,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "stream_interval": interval,
        }
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        if ends := sorted({*sampling.stop_token_ids, *self.ends}):
            params["stop_token_ids"] = ends
        if seeds:
            # The server hashes it with a token's position, so a resumed draw goes on as begun.
            params["sampling_seed"] = self.request.seed % (1 << 63)
        return {
            "rid": rid,
            "input_ids": [*map(int, self.request.prompt_ids), *self.ids],
            "sampling_params": params,
            "return_logprob": True,
            "stream": True,
            "extra_key": label,
        }

    def completion(self, reason: str) -> Completion:
        """What it has, as the rollout yields it."""
        return Completion(
            self.request.key,
            np.array(self.ids, np.int32),
            np.array(self.logprobs, np.float32),
            np.array(self.runs, np.int32).reshape(-1, 2),
            reason,
        )
