"""Generation with continuous batching on any full-attention transformers causal LM.

Shapes: S slots, n busy rows, b rows of a prefill, T tokens, V vocabulary entries.

One `step()` admits waiting requests into free slots, prefills their tokens but the last, then runs
one decode for all busy rows, which takes each row's last token in and draws its next one. Busy rows
are kept at the front and attention reaches as far as the longest of them: cost follows the work.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncflow_transformers.cache import SlotCache
from asyncflow_transformers.forward import make_forward
from asyncflow_transformers.requests import (
    EngineCompletion,
    EngineRequest,
    check_request,
    unstarted,
)
from asyncflow_transformers.sampling import DrawParams, draw
from asyncflow_transformers.slots import SlotTable, compaction, prefill_chunks
from asyncflow_transformers.support import check_supported

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

__all__ = ["EngineCompletion", "EngineRequest", "GenerationEngine"]


class GenerationEngine:
    """Generates for submitted requests, a token a busy slot and step.

    The engine owns its key-value cache and bookkeeping; the caller owns the model's weights, may
    swap them (in place or not) between two steps, and says so with `set_version`. The model is put
    into eval mode and must not be trained meanwhile.

    A token's draw depends on its request's seed, its index in the response and its logits, so it
    repeats in any batch, up to the rounding of the logits (about 1e-6 in float32).

    Concurrency: synchronous and for one thread; nothing but `step` and `recompute_cache` computes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        max_length: int,
        version: int,
        eos_token_ids: Sequence[int],
        prefill_tokens: int = 8192,
    ) -> None:
        """Check that the model can be served exactly and allocate its slots.

        Args:
            model: a decoder-only causal LM; see `support.SUPPORTED`.
            slots: most sequences running at once.
            max_length: longest prompt + response.
            version: of the weights the model has now.
            eos_token_ids: tokens that end every response; may be empty.
            prefill_tokens: most padded tokens in one prefill forward; bounds its memory.

        Raises:
            ValueError: a model that cannot be served exactly, or a value out of range.
        """
        # The shortest sequence is one prompt token and one new one.
        for name, value, least in (
            ("slots", slots, 1),
            ("max_length", max_length, 2),
            ("prefill_tokens", prefill_tokens, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}, allowed: {least} or more")
        check_supported(model, max_length=max_length)
        config = model.config.get_text_config(decoder=True)
        self._vocab_size = int(config.vocab_size)
        for token in eos_token_ids:
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"eos_token_ids holds {token}, allowed: 0..{self._vocab_size - 1}")
        model.eval()  # type: ignore[no-untyped-call, unused-ignore]
        self._slots = slots
        self._max_length = max_length
        self._prefill_tokens = prefill_tokens
        self._cache = SlotCache(layers=config.num_hidden_layers, slots=slots, max_length=max_length)
        self._forward = make_forward(
            model,
            self._cache,
            slots=slots,
            max_length=max_length,
            vocab_size=self._vocab_size,
        )
        self._table = SlotTable(
            slots=slots,
            max_length=max_length,
            vocab_size=self._vocab_size,
            eos_token_ids=eos_token_ids,
        )
        self._waiting: deque[EngineRequest] = deque()
        self._rows: dict[Hashable, int] = {}
        self._keys: set[Hashable] = set()
        self._busy = 0
        self._holes: list[int] = []
        self._params: DrawParams | None = None
        self._version = 0
        self.set_version(version)

    @property
    def version(self) -> int:
        """The version that the next step's tokens will carry."""
        return self._version

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """Requests not yet admitted."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would generate anything."""
        return bool(self._rows or self._waiting)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; slots are given in the order of submission.

        Raises:
            ValueError: naming the key, the value and what is allowed.
        """
        check_request(request, max_length=self._max_length, vocab_size=self._vocab_size)
        if request.key in self._keys:
            raise ValueError(f"request {request.key!r}: key is already waiting or running")
        self._keys.add(request.key)
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[EngineCompletion]:
        """Admit what fits, generate one token for every busy slot, return what ended.

        Returns:
            Completions that ended in this step, with their slots free again.

        Raises:
            FloatingPointError: a row's logits are not finite, as with broken weights. Nothing was
                recorded: the step can be repeated under other weights after `recompute_cache`, or
                the work be aborted.
        """
        self._admit()
        if not self._busy:
            return []
        table, busy = self._table, self._busy
        logits = self._forward.decode(table.pending(busy), table.length[:busy] - 1)
        if self._params is None:
            self._params = table.draw_params(busy, logits.device)
        uniform = torch.from_numpy(table.uniforms(busy)).to(logits.device)
        tokens, logprobs = (x.cpu().numpy() for x in draw(logits, uniform, self._params))
        self._check_finite(logprobs)
        ended = table.append(tokens, logprobs, version=self._version)
        completions = [table.take(row, reason) for row, reason in ended]
        self._free(completions)
        return completions

    def abort(self, keys: Collection[Hashable] | None = None) -> list[EngineCompletion]:
        """Stop sequences and return what they have, to be continued as prefixes or thrown away.

        Args:
            keys: which; None is all. A key neither waiting nor running (it has ended) is skipped,
                so the result says what was aborted.

        Returns:
            Partial responses with finish_reason 'abort', waiting requests' included (these have
            just their prefix, or nothing).
        """
        chosen = self._keys if keys is None else self._keys.intersection(keys)
        if not chosen:
            return []
        running = [key for key in self._rows if key in chosen]
        partials = [self._table.take(self._rows[key], "abort") for key in running]
        partials += [unstarted(request) for request in self._waiting if request.key in chosen]
        self._waiting = deque(r for r in self._waiting if r.key not in chosen)
        self._free(partials)
        if not self._rows:
            # A fresh start, so that no NaN of broken weights survives in a masked entry.
            with torch.inference_mode():
                self._cache.clear()
        return partials

    def set_version(self, version: int) -> None:
        """Say that the caller has just swapped the weights: later tokens carry `version`.

        Running sequences keep the keys and values that older weights computed (an in-flight
        update), so their next tokens are the new weights' given that older context: their
        log-probs are those of the behaviour policy, yet no forward of one set of weights repeats
        them. `recompute_cache` makes them exact at the cost of a prefill.

        Raises:
            ValueError: a version that an int32 column cannot hold.
        """
        if not 0 <= version < 2**31:
            raise ValueError(f"version is {version}, allowed: 0 <= version < 2**31")
        self._version = version

    @torch.inference_mode()
    def recompute_cache(self) -> None:
        """Prefill all running sequences anew, under the weights the model has now.

        Should it fail half-way (out of memory), call it again or abort the running sequences.
        """
        self._compact()
        self._prefill(np.arange(self._busy))

    def _admit(self) -> None:
        count = min(len(self._waiting), self._slots - len(self._rows))
        if count:
            self._holes.sort()
            rows = self._holes[:count]
            del self._holes[:count]
            fresh = count - len(rows)
            rows += range(self._busy, self._busy + fresh)
            self._busy += fresh
            for row in rows:
                request = self._waiting.popleft()
                self._table.load(row, request)
                self._rows[request.key] = row
            self._params = None
            try:
                self._prefill(np.array(rows))
            except BaseException:
                # Without this, a next step would decode over rows that were never filled.
                self._unadmit(rows)
                raise
        self._compact()

    def _unadmit(self, rows: list[int]) -> None:
        for row in reversed(rows):
            request = self._table.requests[row]
            if request is not None:
                self._table.requests[row] = None
                del self._rows[request.key]
                self._holes.append(row)
                self._waiting.appendleft(request)

    def _compact(self) -> None:
        """Move the last busy rows into the holes, so that busy rows are the first ones."""
        if not self._holes:
            return
        busy = len(self._rows)
        sources, targets = compaction(self._holes, busy=busy, end=self._busy)
        if sources.size:
            length = int(self._table.length[sources].max())
            self._table.move(sources, targets)
            self._cache.move(sources, targets, length=length)
            places = dict(zip(sources.tolist(), targets.tolist(), strict=True))
            self._rows = {key: places.get(row, row) for key, row in self._rows.items()}
        self._holes.clear()
        self._busy = busy
        self._params = None

    def _prefill(self, rows: NDArray[np.int64]) -> None:
        """Compute the cache of the rows' tokens but the last, which the next decode takes in.

        Rows are padded on the right with whatever their slots hold: causal attention keeps that
        from reaching earlier positions, and the rows' own tokens overwrite it.
        """
        lengths = self._table.length[rows] - 1
        rows, lengths = rows[lengths > 0], lengths[lengths > 0]
        for chunk in prefill_chunks(rows, lengths, token_budget=self._prefill_tokens):
            width = int(self._table.length[chunk].max()) - 1
            self._forward.prefill(self._table.tokens[chunk, :width], chunk)

    def _free(self, completions: list[EngineCompletion]) -> None:
        for completion in completions:
            self._keys.discard(completion.key)
            row = self._rows.pop(completion.key, None)
            if row is not None:
                self._holes.append(row)

    def _check_finite(self, logprobs: NDArray[np.float32]) -> None:
        finite = np.isfinite(logprobs)
        if not finite.all():
            bad = self._table.requests[int(np.argmin(finite))]
            key = None if bad is None else bad.key
            raise FloatingPointError(
                f"request {key!r}: logits are not finite at version {self._version}, allowed: "
                "finite logits; check the weights last loaded"
            )
