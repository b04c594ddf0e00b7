"""Log-probs of a batch's responses under a causal language model.

Shapes: B rows, L padded tokens a row, T response tokens of all rows one after another, H hidden
size, V vocabulary entries.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from asyncflow_core.batch import Batch, Column
from asyncflow_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CausalForward", "Packed", "check_rows", "pack", "split_rows", "temperatures"]

logger = logging.getLogger(__name__)

_CHUNK_LOGITS = 2**26
"""Most logits at a time, 256 MiB in float32; larger batches recompute them in the backward."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch as the model takes it.

    Attributes:
        ids: int64 [B, L], padded on the right with 0.
        at: int64 [T], flat positions in [B * L] whose logits predict the response tokens.
        targets: int64 [T], the response tokens.
        temperature: float32 [T], None where all are 1.
    """

    ids: torch.Tensor
    at: torch.Tensor
    targets: torch.Tensor
    temperature: torch.Tensor | None


def check_rows(batch: Batch, *, vocab_size: int, max_length: int | None) -> None:
    """Refuse rows the model cannot take.

    Raises:
        DataError: naming the row of the batch, the value and what is allowed.
    """
    for name in ("prompt_ids", "response_ids"):
        if name not in batch or batch[name].offsets is None:
            raise DataError(f"the trainer needs the ragged column {name!r}, got {batch!r}")
        column = batch[name]
        ids = column.array
        if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
            value = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
            row = int(np.searchsorted(_offsets(column), value, side="right")) - 1
            raise DataError(
                f"row {row}: column {name!r} has the token id {ids[value]}; allowed are "
                f"0..{vocab_size - 1}"
            )
    prompts = batch["prompt_ids"].lengths
    if batch.rows and prompts.min() == 0:
        raise DataError(f"row {int(prompts.argmin())}: the prompt is empty; it needs one token")
    totals = prompts + batch["response_ids"].lengths
    if max_length is not None and batch.rows and totals.max() > max_length:
        raise DataError(
            f"row {int(totals.argmax())}: {totals.max()} tokens, but the model takes at most "
            f"{max_length}"
        )


def temperatures(batch: Batch) -> NDArray[np.float32] | None:
    """Each row's divisor of the logits, float32 [B]; None where all are 1.

    A greedy row (temperature 0) counts as 1, as for the rollout. A batch without `sampling` was
    not sampled by us: all 1.

    Raises:
        DataError: a row was drawn with truncation, whose log-probs this trainer cannot repeat.
    """
    if "sampling" not in batch:
        return None
    result = np.ones(batch.rows, np.float32)
    for row, entry in enumerate(batch["sampling"].values):
        top_p, top_k, min_p = entry.get("top_p", 1), entry.get("top_k", 0), entry.get("min_p", 0)
        if top_p < 1 or top_k > 0 or min_p > 0:
            raise DataError(
                f"row {row}: drawn with top_p={top_p}, top_k={top_k}, min_p={min_p}, which this "
                f"trainer cannot mask; sample with top_p=1, top_k=0, min_p=0"
            )
        result[row] = entry.get("temperature", 1.0) or 1.0
    return None if bool((result == 1.0).all()) else result


def split_rows(lengths: NDArray[np.int64], limit: int) -> list[NDArray[np.int64]]:
    """Rows of each forward: similar lengths together, at most `limit` padded tokens.

    A quarter of the limit may be padding. One forward keeps the rows' order; several go from long
    to short, so that what does not fit in memory fails at once.
    """
    rows = len(lengths)
    padded = rows * int(lengths.max(initial=0))
    if padded <= limit and padded - int(lengths.sum()) <= limit // 4:
        return [np.arange(rows)]
    order = np.argsort(-lengths, kind="stable")
    parts: list[NDArray[np.int64]] = []
    start, real = 0, 0
    for end, length in enumerate(lengths[order].tolist()):
        padded = (end + 1 - start) * int(lengths[order[start]])
        if end > start and (padded > limit or padded - real - length > limit // 4):
            parts.append(order[start:end])
            start, real = end, 0
        real += length
    parts.append(order[start:])
    return parts


def pack(batch: Batch, temperature: NDArray[np.float32] | None, device: torch.device) -> Packed:
    """Lay rows out as [B, L]; a row's last token predicts nothing and is left out.

    Padding needs no mask: it lies right of all tokens, where causal attention does not look.
    """
    prompt, response = batch["prompt_ids"], batch["response_ids"]
    prompts, responses = prompt.lengths, response.lengths
    row_p = np.repeat(np.arange(batch.rows), prompts)
    row_r = np.repeat(np.arange(batch.rows), responses)
    at_p = np.arange(len(row_p)) - _offsets(prompt)[row_p]
    at_r = np.arange(len(row_r)) - _offsets(response)[row_r] + prompts[row_r]
    ids = np.zeros((batch.rows, int((prompts + responses).max())), np.int64)
    ids[row_p, at_p] = prompt.array
    ids[row_r, at_r] = response.array
    width = max(ids.shape[1] - 1, 1)

    def put(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return Packed(
        ids=put(np.ascontiguousarray(ids[:, :width])),
        at=put(row_r * width + at_r - 1),
        targets=put(response.array.astype(np.int64)),
        temperature=None if temperature is None else put(temperature[row_r]),
    )


class CausalForward:
    """Runs a model for log-probs, making logits at response positions only.

    Where the model does more than its head to the hidden states (softcapping, scaling), which a
    probe finds out, its own logits are used.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._base: Any = model.base_model
        self._head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._direct = self._head is not None and self._base is not model and self._probe()
        if not self._direct:
            logger.info("%s transforms its logits: using its full forward", type(model).__name__)

    @torch.no_grad()
    def _probe(self) -> bool:
        ids = torch.arange(8, device=self._model.device)[None] % self.vocab_size
        logits = self._head(self._base(input_ids=ids, use_cache=False)[0])
        return torch.equal(logits, self._model(input_ids=ids, use_cache=False).logits)

    def __call__(
        self, packed: Packed, *, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs of the response tokens and, if asked, the entropies of their distributions.

        Shapes: results float32 [T].
        """
        if self._direct:
            source = self._base(input_ids=packed.ids, use_cache=False)[0]
            source, head, at = source.flatten(0, 1), self._head, packed.at
        else:
            source, at = self._logits(packed)
            head = _identity
        source = source.index_select(0, at)
        rows = max(1, _CHUNK_LOGITS // self.vocab_size)
        if len(at) <= rows:
            return _score(source, packed.targets, packed.temperature, head, entropy)
        chunks = range(0, len(at), rows)
        scores = [
            checkpoint(
                _score,
                source[start : start + rows],
                packed.targets[start : start + rows],
                None if packed.temperature is None else packed.temperature[start : start + rows],
                head,
                entropy,
                use_reentrant=False,
            )
            for start in chunks
        ]
        logprobs = torch.cat([score[0] for score in scores])
        return logprobs, torch.cat([score[1] for score in scores]) if entropy else None

    def _logits(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits flat [B * kept, V] and where in them the response's are."""
        width = packed.ids.shape[1]
        kept, kwargs = width, {}
        if self._keeps and len(packed.at):
            kept = width - int((packed.at % width).min())
            kwargs = {"logits_to_keep": kept}
        logits = self._model(input_ids=packed.ids, use_cache=False, **kwargs).logits
        at = packed.at // width * kept + packed.at % width - (width - kept)
        return logits.flatten(0, 1), at


def _identity(logits: torch.Tensor) -> torch.Tensor:
    return logits


def _score(
    source: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor | None,
    head: Any,
    entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits = head(source).float()
    if temperature is not None:
        logits = logits / temperature[:, None]
    if not entropy:
        return -functional.cross_entropy(logits, targets, reduction="none"), None
    every = logits.log_softmax(dim=-1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(dim=-1)


def _offsets(column: Column) -> NDArray[np.int64]:
    assert column.offsets is not None
    return column.offsets
