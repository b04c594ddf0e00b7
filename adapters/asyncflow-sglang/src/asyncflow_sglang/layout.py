"""SGLang's own checksum of its weights, recomputed from what was published.

SGLang fuses projections: q, k, v and gate, up lie one under the other in one tensor. On a CPU its
checksum of a tensor is the first 8 bytes of the SHA-256 of its bytes. Known for dense Qwen2, Qwen3
and Llama on one rank, with weights in the dtype in which they are published; on a GPU SGLang uses
another hash.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncflow_sglang.files import Held

__all__ = ["KNOWN", "difference", "expected", "known_reason"]

KNOWN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")
"""Architectures whose layout is known."""

_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_PART = {part: fused for fused, parts in _FUSED.items() for part in parts}
_NAME = re.compile(r"^(.*\.)(self_attn\.[qkv]_proj|mlp\.(?:gate|up)_proj)\.(weight|bias)$")
_DTYPES = {"float32": "F32", "float16": "F16", "half": "F16", "bfloat16": "BF16"}
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_PADDED_TO = 64


def known_reason(model: str, server: Mapping[str, Any], held: Held) -> str:
    """Why the layout on a server is not known; empty if it is.

    Args:
        model: directory with config.json.
        server: the server's own arguments.
        held: what it should hold.
    """
    config = json.loads((Path(model) / "config.json").read_text("utf-8"))
    architecture = (config.get("architectures") or [""])[0]
    dtype = str(server.get("dtype"))
    dtype = str(config.get("dtype") or config.get("torch_dtype")) if dtype == "auto" else dtype
    found = {spec.dtype for spec in held.tensors.values()}
    ranks = int(server.get("tp_size") or 1) * int(server.get("pp_size") or 1)
    reasons = {
        f"its architecture {architecture} is none of {', '.join(KNOWN)}": architecture not in KNOWN,
        f"its device {server.get('device')} is not cpu": server.get("device") != "cpu",
        f"its weights are spread over {ranks} ranks": ranks != 1,
        f"it is quantised by {server.get('quantization')}": bool(server.get("quantization")),
        f"its weights are {dtype}, published were {sorted(found)}": found != {_DTYPES.get(dtype)},
        "it has LoRA adapters": bool(server.get("enable_lora")),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def expected(held: Held) -> dict[str, str]:
    """The checksums of a server that holds this version, by SGLang's names."""
    sums: dict[str, str] = {}
    for name in held.tensors:
        match = _NAME.match(name)
        if match is None:
            sums[name] = _digest(held, [name])
            continue
        fused = _PART[match[2]]
        sums.setdefault(
            f"{match[1]}{fused}.{match[3]}",
            _digest(held, [f"{match[1]}{part}.{match[3]}" for part in _FUSED[fused]]),
        )
    return sums


def _digest(held: Held, names: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        digest.update(held.read(name).data)
    if names[0] in _VOCABULARY:
        rows = held.tensors[names[0]].shape[0]
        row_bytes = held.tensors[names[0]].nbytes // max(rows, 1)
        digest.update(bytes(row_bytes * (-rows % _PADDED_TO)))
    return digest.digest()[:8].hex()


def difference(ours: Mapping[str, str], answer: Mapping[str, Any]) -> str:
    """What /weights_checker reports otherwise than it should; empty if all is equal.

    Args:
        ours: from `expected`.
        answer: the server's.
    """
    ranks = answer.get("ranks") or [{}]
    theirs: Mapping[str, str] = ranks[0].get("checksums") or {}
    # A tied head is the embedding, and may or may not be listed.
    tied = {"lm_head.weight"} if "lm_head.weight" not in ours else set()
    for name in sorted((ours.keys() | theirs.keys()) - tied):
        if ours.get(name) != theirs.get(name):
            return (
                f"tensor {name!r} has the checksum {theirs.get(name)}, published was "
                f"{ours.get(name)}"
            )
    return ""
