"""A forward for Llama-shaped models that spends little outside the matrix products.

Shapes: n busy rows, b rows, T tokens (1 in a decode), H query heads, G key-value heads, D head
size, N = b * T, V vocabulary entries.

At hidden size 64 the model's own forward spends about two thirds of a decode in Python. This one
reads the same modules' parameters on every call, copies no weight, and is used only where a probe
at construction agrees with the model's own forward.

Source: transformers 5.24 `models/{llama,qwen2,qwen3}/modeling_*.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from asyncflow_transformers.cache import SlotCache

__all__ = ["LeanForward"]

_CLASSES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Rotary frequencies that depend on nothing but the position; the others need the model's forward.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


class LeanForward:
    """Runs a Llama, Qwen2 or Qwen3 over the slots; see `forward.Forward`."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache, *, max_length: int) -> None:
        """Collect the modules whose parameters are read, and tabulate the rotary angles."""
        base: Any = model.model
        self._device = model.device
        self._cache = cache
        self._max_length = max_length
        self._embed: nn.Embedding = base.embed_tokens
        self._layers: list[Any] = list(base.layers[: model.config.num_hidden_layers])
        self._norm = base.norm
        self._head: Any = model.lm_head
        probe = torch.zeros(1, dtype=torch.float32, device=self._device)
        cos, sin = base.rotary_emb(probe, torch.arange(max_length, device=self._device)[None])
        half = cos.shape[-1] // 2
        self._cos = cos[0]
        # Signed, so that rotating by half is a plain roll.
        self._sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
        self._half = half

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Say whether the model is one whose every part this forward reproduces."""
        config: Any = model.config
        rope = getattr(config, "rope_parameters", None) or {}
        if type(model).__name__ not in _CLASSES or model.dtype != torch.float32:
            return False
        if not type(model).__module__.startswith("transformers.models."):
            return False
        if config.hidden_act != "silu" or rope.get("rope_type", "default") not in _STATIC_ROPE:
            return False
        if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
            return False
        # Adapters and quantisation put other classes, with other forwards, in place of nn.Linear.
        return all(
            type(module) is nn.Linear
            for name, module in model.named_modules()
            if name.endswith(("_proj", "lm_head"))
        )

    def prefill(self, tokens: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Fill the cache of `rows` at positions 0..T-1. Shapes: tokens [b, T]; rows [b]."""
        self._cache.begin_prefill(torch.from_numpy(rows).to(self._device))
        width = tokens.shape[1]
        cos, sin = self._cos[:width, None], self._sin[:width, None]
        hidden = functional.embedding(self._ids(tokens), self._embed.weight)
        for index, layer in enumerate(self._layers[:-1]):
            hidden = self._layer(index, layer, hidden, cos, sin, None)
        # The last layer's output is not needed, just what it leaves in the cache.
        last = self._layers[-1]
        self._attended(len(self._layers) - 1, last, hidden, cos, sin)

    def decode(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> torch.Tensor:
        """Take one token into each of the first n rows and return the logits [n, V]."""
        length = int(positions.max()) + 1
        targets = positions + np.arange(positions.shape[0]) * self._max_length
        self._cache.begin_decode(torch.from_numpy(targets).to(self._device), length=length)
        at = torch.from_numpy(positions).to(self._device)
        cos, sin = self._cos[at][:, None, None], self._sin[at][:, None, None]
        mask = None
        if int(positions.min()) + 1 < length:
            hidden_keys = torch.arange(length, device=self._device) > at[:, None]
            mask = torch.zeros(hidden_keys.shape, device=self._device)
            mask = mask.masked_fill_(hidden_keys, torch.finfo(mask.dtype).min)[:, None, None]
        hidden = functional.embedding(self._ids(tokens[:, None]), self._embed.weight)
        for index, layer in enumerate(self._layers):
            hidden = self._layer(index, layer, hidden, cos, sin, mask)
        return functional.linear(_rms(hidden[:, 0], self._norm), self._head.weight, self._head.bias)

    def _ids(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(tokens)).to(self._device)

    def _attended(
        self, index: int, layer: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated queries and the keys and values to attend to, having stored the new ones.

        Shapes: hidden [b, T, width]; cos, sin [b or 1, T, 1, D] or [T, 1, D]; results
        [b, T, H, D], [b, G, L, D], [b, G, L, D].
        """
        attention = layer.self_attn
        shape = (*hidden.shape[:2], -1, attention.head_dim)
        hidden = _rms(hidden, layer.input_layernorm)
        queries = _linear(hidden, attention.q_proj).view(shape)
        keys = _linear(hidden, attention.k_proj).view(shape)
        values = _linear(hidden, attention.v_proj).view(shape)
        if hasattr(attention, "q_norm"):
            queries, keys = _rms(queries, attention.q_norm), _rms(keys, attention.k_norm)
        # Both are rotated at once: at this size an operation costs more than its arithmetic.
        both = torch.cat([queries, keys], dim=2)
        both = (both * cos).addcmul_(both.roll(self._half, dims=-1), sin)
        heads = queries.shape[2]
        all_keys, all_values = self._cache.slot_layers[index].update(
            both[:, :, heads:].transpose(1, 2), values.transpose(1, 2)
        )
        return both[:, :, :heads], all_keys, all_values

    def _layer(
        self,
        index: int,
        layer: Any,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run a decoder layer; several tokens attend causally, one to all that the mask shows."""
        queries, keys, values = self._attended(index, layer, hidden, cos, sin)
        scale = layer.self_attn.scaling
        batch, width, heads, size = queries.shape
        if self._cache.prefilling:
            out = functional.scaled_dot_product_attention(
                queries.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=True
            ).transpose(1, 2)
        else:
            # The queries that share a key-value head are one matrix of queries for it.
            grouped = queries.reshape(batch, keys.shape[1], -1, size)
            out = functional.scaled_dot_product_attention(
                grouped, keys, values, attn_mask=mask, scale=scale
            )
        mixed = out.reshape(batch, width, heads * size)
        hidden = hidden + _linear(mixed, layer.self_attn.o_proj)
        mlp = layer.mlp
        inner = _rms(hidden, layer.post_attention_layernorm)
        gate = functional.silu(_linear(inner, mlp.gate_proj))
        return hidden + _linear(gate.mul_(_linear(inner, mlp.up_proj)), mlp.down_proj)


def _linear(x: torch.Tensor, module: Any) -> torch.Tensor:
    return functional.linear(x, module.weight, module.bias)


def _rms(x: torch.Tensor, module: Any) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)
