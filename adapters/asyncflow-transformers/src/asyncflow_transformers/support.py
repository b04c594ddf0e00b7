"""Which models the generation engine serves exactly, and why it refuses the others."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

__all__ = ["SUPPORTED", "check_supported"]

SUPPORTED = (
    "decoder-only causal LMs with full attention and positions given by position_ids, such as "
    "llama, qwen2, qwen3, mistral, smollm3"
)

# The engine's masks are additive 4-D tensors, which flash and paged kernels do not take.
_ATTENTION = ("sdpa", "eager")
_WINDOWED = {
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}


def check_supported(model: PreTrainedModel, *, max_length: int) -> None:
    """Refuse a model whose cached, batched generation would differ from its plain forward.

    Args:
        model: a transformers causal LM.
        max_length: longest sequence that will be generated, in tokens.

    Raises:
        ValueError: naming the model type, what stands in the way and what is supported.
    """
    config = model.config
    for problem in _problems(model, config.get_text_config(decoder=True), max_length):
        raise ValueError(
            f"cannot serve model_type {config.model_type!r} exactly: {problem}; supported are "
            f"{SUPPORTED}"
        )


def _problems(model: PreTrainedModel, config: Any, max_length: int) -> Iterator[str]:
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        yield f"its weights are on {' and '.join(devices)}, allowed: one device that computes"
    if model.config.is_encoder_decoder:
        yield "it is an encoder-decoder"
    if getattr(model, "_is_stateful", False):
        yield "it keeps recurrent or linear-attention state, which has no per-token cache"
    if getattr(config, "is_causal", True) is False:
        yield "its attention is bidirectional (is_causal is false)"
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        yield "its forward takes no position_ids, which ragged rows need"
    if "cache" not in parameters and "past_key_values" not in parameters:
        yield "its forward takes no key-value cache"
    if config._attn_implementation not in _ATTENTION:
        yield (
            f"attn_implementation is {config._attn_implementation!r}, allowed: "
            f"{' or '.join(map(repr, _ATTENTION))}"
        )
    yield from _layer_problems(config, max_length)
    yield from _position_problems(config, max_length)


def _layer_problems(config: Any, max_length: int) -> Iterator[str]:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        # Without layer_types a window set in the config holds for all layers.
        layer_types = [
            kind for kind, name in _WINDOWED.items() if getattr(config, name, None) is not None
        ]
    if getattr(config, "kv_sharing_modes", None) is not None:
        yield "its layers share key-value caches"
    for layer_type in sorted(set(layer_types)):
        if layer_type in _WINDOWED:
            window = getattr(config, _WINDOWED[layer_type], None)
            if window is None or window < max_length:
                yield (
                    f"it has {layer_type} layers with {_WINDOWED[layer_type]} {window}, allowed: "
                    f"at least max_length {max_length}"
                )
        elif layer_type != "full_attention":
            yield f"it has {layer_type} layers"


def _position_problems(config: Any, max_length: int) -> Iterator[str]:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_length > limit:
        yield f"max_length is {max_length}, allowed: at most its max_position_embeddings {limit}"
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or limit
    if rope.get("rope_type") == "longrope" and original is not None and max_length > original:
        # One frequency set serves the whole batch, chosen by its longest row.
        yield (
            f"its longrope changes with the longest row of a batch beyond {original} positions, "
            f"allowed: max_length up to that, got {max_length}"
        )
