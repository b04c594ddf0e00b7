"""A preallocated key-value cache with one row a slot and its own position in each.

Shapes: S slots, L max_length, H key-value heads, D head size, b rows of a prefill, T tokens.

A token at position p of a sequence lies at index p of its row, so rows need no alignment, and a
stale entry beyond a row's length is harmless: it is masked until the row's own token overwrites
it. The tensors are [S, L, H, D], which makes a write one `index_copy_` over rows of H * D floats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["SlotCache", "SlotLayer"]


class _Cursor:
    """Where the forward that is about to run writes, shared by all layers."""

    __slots__ = ("busy", "length", "rows", "targets")

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        """int64 [b] slots of a prefill; None while decoding."""
        self.targets: torch.Tensor = torch.empty(0, dtype=torch.int64)
        """int64 [busy] flat indices (slot * max_length + position) of a decode's tokens."""
        self.busy = 0
        self.length = 0


# transformers types only part of itself, and none of it where it is not installed.
class SlotLayer(CacheLayerMixin):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Keys and values of one decoder layer.

    Source: the interface is that of transformers 5.24 `cache_utils.CacheLayerMixin`.
    """

    is_sliding = False

    def __init__(self, slots: int, max_length: int, cursor: _Cursor) -> None:
        """Reserve nothing yet; the first update allocates."""
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._slots = slots
        self._max_length = max_length
        self._cursor = cursor
        self.key_cache: torch.Tensor = torch.empty(0)
        self.value_cache: torch.Tensor = torch.empty(0)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate once the first keys tell heads, head size, dtype and device.

        Zeros, not uninitialised memory: a masked NaN still poisons attention (0 * NaN).
        """

        def like(states: torch.Tensor) -> torch.Tensor:
            shape = (self._slots, self._max_length, states.shape[1], states.shape[3])
            return torch.zeros(shape, dtype=states.dtype, device=states.device)

        self.key_cache = like(key_states)
        self.value_cache = like(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values and return those to attend to.

        Args:
            key_states: new keys, rotated.
            value_states: new values.
            *args: unused; part of the transformers interface.
            **kwargs: unused; part of the transformers interface.

        Returns:
            In a prefill the arguments themselves, which is all there is to attend to; in a decode
            the busy rows up to the longest length, as views.

        Shapes: arguments [b, H, T, D] (T = 1 in a decode); decode results [busy, H, length, D].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cursor = self._cursor
        if cursor.rows is not None:
            tokens = key_states.shape[2]
            self.key_cache[:, :tokens].index_copy_(0, cursor.rows, key_states.transpose(1, 2))
            self.value_cache[:, :tokens].index_copy_(0, cursor.rows, value_states.transpose(1, 2))
            return key_states, value_states
        for cache, states in ((self.key_cache, key_states), (self.value_cache, value_states)):
            cache.flatten(0, 1).index_copy_(0, cursor.targets, states.squeeze(2))
        busy, length = cursor.busy, cursor.length
        keys = self.key_cache[:busy, :length].transpose(1, 2)
        return keys, self.value_cache[:busy, :length].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (keys attended to, offset of the first), as the mask makers of the model ask."""
        if self._cursor.rows is not None:
            return query_length, 0
        return self._cursor.length, 0

    def get_seq_length(self) -> int:
        """Return how many tokens are there already: none in a prefill, which fills empty rows."""
        return 0 if self._cursor.rows is not None else self._cursor.length - 1

    def get_max_length(self) -> int:
        """Return how many tokens a row holds."""
        return self._max_length

    def each(self, change: Callable[[torch.Tensor], object]) -> None:
        """Apply a change in place to keys and values, if they are allocated."""
        if self.is_initialized:
            change(self.key_cache)
            change(self.value_cache)


class SlotCache(Cache):  # type: ignore[misc, unused-ignore]
    """All layers' slots; the engine says before each forward what it is about to do."""

    def __init__(self, *, layers: int, slots: int, max_length: int) -> None:
        """Make one `SlotLayer` for each of the model's layers."""
        self._cursor = _Cursor()
        self._max_length = max_length
        self.slot_layers = [SlotLayer(slots, max_length, self._cursor) for _ in range(layers)]
        super().__init__(layers=list(self.slot_layers))

    @property
    def prefilling(self) -> bool:
        """Whether the forward under way is a prefill."""
        return self._cursor.rows is not None

    def begin_prefill(self, rows: torch.Tensor) -> None:
        """Make the next forward write its T tokens to positions 0..T-1 of `rows` (int64 [b])."""
        self._cursor.rows = rows

    def begin_decode(self, targets: torch.Tensor, *, length: int) -> None:
        """Make the next forward write one token for each of the first rows.

        Args:
            targets: flat indices (slot * max_length + position), one for each busy row, in order.
            length: longest length after the write; attention looks no further.
        """
        self._cursor.rows = None
        self._cursor.targets = targets
        self._cursor.busy = targets.shape[0]
        self._cursor.length = length

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64], *, length: int) -> None:
        """Copy the first `length` positions of slots `sources` over slots `targets`."""

        def change(cache: torch.Tensor) -> None:
            source, target = (torch.from_numpy(x).to(cache.device) for x in (sources, targets))
            cache[target, :length] = cache[source, :length]

        for layer in self.slot_layers:
            layer.each(change)

    def clear(self) -> None:
        """Zero everything, so that nothing non-finite is left behind."""
        for layer in self.slot_layers:
            layer.each(torch.Tensor.zero_)
