"""Bookkeeping of the running sequences: one row a slot, vectorised over the busy rows.

Shapes: S slots, L max_length, n busy rows (always the first n), K stop tokens of a row.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncflow_transformers.requests import EngineCompletion, version_runs
from asyncflow_transformers.sampling import DrawParams, stream_states, uniforms

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from asyncflow_transformers.requests import EngineRequest, FinishReason

__all__ = ["SlotTable", "compaction", "prefill_chunks"]


class SlotTable:
    """Tokens, limits and sampling state of every slot, as arrays.

    A row's last token is pending: known, but not in the key-value cache until the next decode.
    """

    def __init__(
        self, *, slots: int, max_length: int, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Allocate all rows, empty."""
        self.requests: list[EngineRequest | None] = [None] * slots
        self.tokens = np.zeros((slots, max_length), np.int64)
        self.length = np.zeros(slots, np.int64)
        self._logprobs = np.zeros((slots, max_length), np.float32)
        self._versions = np.zeros((slots, max_length), np.int32)
        self._prompt = np.zeros(slots, np.int64)
        self._limit = np.zeros(slots, np.int64)
        self._state = np.zeros(slots, np.uint64)
        self._temperature = np.ones(slots, np.float64)
        self._top_k = np.zeros(slots, np.int64)
        self._top_p = np.ones(slots, np.float64)
        self._min_p = np.zeros(slots, np.float64)
        # Stop tokens and the last tokens of stop sequences; -1 pads.
        self._stops = np.full((slots, 0), -1, np.int64)
        self._is_eos = np.zeros(vocab_size, np.bool_)
        self._is_eos[list(eos_token_ids)] = True
        self._arange = np.arange(slots)

    def load(self, row: int, request: EngineRequest) -> None:
        """Put a request (already checked) into a row, continuing from its prefix."""
        prompt = request.prompt_ids.size
        self.requests[row] = request
        self.tokens[row, :prompt] = request.prompt_ids
        end = prompt
        if request.prefix_ids is not None and request.prefix_versions is not None:
            end = prompt + request.prefix_ids.size
            self.tokens[row, prompt:end] = request.prefix_ids
            self._logprobs[row, prompt:end] = request.prefix_logprobs
            version, count = request.prefix_versions.T
            self._versions[row, prompt:end] = np.repeat(version, count)
        self.length[row] = end
        self._prompt[row] = prompt
        self._limit[row] = prompt + request.max_new_tokens
        self._state[row] = stream_states(np.array([request.seed], np.uint64))[0]
        self._temperature[row] = request.temperature
        self._top_k[row] = request.top_k
        self._top_p[row] = request.top_p
        self._min_p[row] = request.min_p
        self._load_stops(row, request)

    def _load_stops(self, row: int, request: EngineRequest) -> None:
        stops = {*request.stop_token_ids, *(ids[-1] for ids in request.stop_sequences)}
        width = self._stops.shape[1]
        if len(stops) > width:
            self._stops = np.pad(self._stops, ((0, 0), (0, len(stops) - width)), constant_values=-1)
        if self._stops.shape[1]:
            self._stops[row] = -1
            self._stops[row, : len(stops)] = sorted(stops)

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copy rows `sources` over rows `targets`."""
        for array in self._columns():
            array[targets] = array[sources]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.requests[target] = self.requests[source]
            self.requests[source] = None

    def _columns(self) -> tuple[NDArray[Any], ...]:
        """Return every array with a row a slot."""
        return (
            self.tokens,
            self.length,
            self._logprobs,
            self._versions,
            self._prompt,
            self._limit,
            self._state,
            self._temperature,
            self._top_k,
            self._top_p,
            self._min_p,
            self._stops,
        )

    def draw_params(self, busy: int, device: torch.device) -> DrawParams:
        """Gather the sampling parameters of the busy rows."""
        return DrawParams.build(
            self._temperature[:busy],
            self._top_k[:busy],
            self._top_p[:busy],
            self._min_p[:busy],
            device=device,
        )

    def uniforms(self, busy: int) -> NDArray[np.float64]:
        """Return the uniform that draws each busy row's next token."""
        return uniforms(self._state[:busy], self.length[:busy] - self._prompt[:busy])

    def pending(self, busy: int) -> NDArray[np.int64]:
        """Return each busy row's last token."""
        last: NDArray[np.int64] = self.tokens[self._arange[:busy], self.length[:busy] - 1]
        return last

    def append(
        self, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], *, version: int
    ) -> list[tuple[int, FinishReason]]:
        """Give every busy row its next token.

        Args:
            tokens: one a busy row.
            logprobs: their behaviour log-probs.
            version: the weights that produced them.

        Returns:
            The rows that ended, ascending, with the reason; 'stop' wins over 'length'.

        Shapes: tokens [n]; logprobs [n].
        """
        busy = tokens.shape[0]
        rows, at = self._arange[:busy], self.length[:busy]
        self.tokens[rows, at] = tokens
        self._logprobs[rows, at] = logprobs
        self._versions[rows, at] = version
        at += 1
        stopped = self._is_eos[tokens]
        if self._stops.shape[1]:
            hits = (self._stops[:busy] == tokens[:, None]).any(axis=1) & ~stopped
            for row in np.flatnonzero(hits).tolist():
                stopped[row] = self._ends_with_stop(row)
        done = np.flatnonzero(stopped | (at >= self._limit[:busy]))
        return [(row, "stop" if stopped[row] else "length") for row in done.tolist()]

    def _ends_with_stop(self, row: int) -> bool:
        request = self.requests[row]
        if request is None:
            return False
        response = self.tokens[row, self._prompt[row] : self.length[row]]
        if int(response[-1]) in request.stop_token_ids:
            return True
        return any(
            tuple(response[-len(ids) :].tolist()) == ids
            for ids in map(tuple, request.stop_sequences)
        )

    def take(self, row: int, reason: FinishReason) -> EngineCompletion:
        """Remove a row's sequence and return what it has generated."""
        request = self.requests[row]
        if request is None:
            raise RuntimeError(f"slot {row} holds no request; this is a bug in the engine")
        self.requests[row] = None
        part = slice(int(self._prompt[row]), int(self.length[row]))
        return EngineCompletion(
            key=request.key,
            response_ids=self.tokens[row, part].astype(np.int32),
            logprobs=self._logprobs[row, part].copy(),
            versions=version_runs(self._versions[row, part]),
            finish_reason=reason,
        )


def prefill_chunks(
    rows: NDArray[np.int64], lengths: NDArray[np.int64], *, token_budget: int
) -> list[NDArray[np.int64]]:
    """Split rows into prefill forwards of at most `token_budget` padded tokens each.

    Rows of similar length go together, so that little is spent on padding; a row longer than the
    budget goes alone.

    Shapes: rows [b]; lengths [b].
    """
    if not rows.size:
        return []
    order = np.argsort(lengths, kind="stable")
    cuts = [0]
    for index, length in enumerate(lengths[order].tolist()):
        if (index + 1 - cuts[-1]) * length > token_budget and index > cuts[-1]:
            cuts.append(index)
    cuts.append(order.size)
    return [rows[order[start:end]] for start, end in pairwise(cuts)]


def compaction(
    holes: Sequence[int], *, busy: int, end: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Say which rows to move where, so that `busy` rows spread over 0..end-1 become the first.

    Returns:
        Sources and targets, equally many; each target is a hole.
    """
    empty = np.array(sorted(holes), np.int64)
    sources = np.setdiff1d(np.arange(busy, end), empty, assume_unique=True)
    return sources, empty[empty < busy]
