"""Loading a Hugging Face causal language model for training, and writing one out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from asyncflow_core.errors import ConfigError
from asyncflow_hzp.options import HzpOptions, check_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["choose_device", "load_model", "max_positions", "write_model"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def choose_device(name: str) -> torch.device:
    """The device an option names; "cuda" is this rank's, "auto" too, or the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


def load_model(options: HzpOptions, device: torch.device) -> PreTrainedModel:
    """The model, every parameter trainable unless it is `frozen`, and without dropout.

    It stays in eval mode, since log-probs must be those of the policy that samples; checkpointing
    needs train mode (transformers ties the two), so dropout must then be off in the config.

    Raises:
        ConfigError: the directory holds no model, or dropout would be active.
    """
    faults = list(check_options(options))
    if faults:
        raise ConfigError(faults)
    with _without_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(
            options.model, **{"dtype": getattr(torch, options.dtype), **options.engine_args}
        )
    model.to(device)
    model.requires_grad_(not options.frozen)
    model.eval()
    if options.gradient_checkpointing:
        _refuse_dropout(model)
        # transformers 5 renames the method; its first releases have the old name only.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        model.train()
    if options.compile:
        model.base_model.compile(dynamic=True)
    loaded: PreTrainedModel = model
    return loaded


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """A service does not draw on the user's terminal."""
    active = is_progress_bar_enabled()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if active:
            enable_progress_bar()  # type: ignore[no-untyped-call]


def _refuse_dropout(model: PreTrainedModel) -> None:
    config: dict[str, Any] = model.config.get_text_config(decoder=True).to_dict()
    active = {
        name: value
        for name, value in config.items()
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float) and value > 0
    }
    if active:
        off = dict.fromkeys(active, 0.0)
        raise ConfigError(
            f"gradient_checkpointing needs a model without dropout, its config has {active}; "
            f"set engine_args: {off}"
        )


def max_positions(model: PreTrainedModel) -> int | None:
    """Most tokens a row may have; None without limit."""
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    return int(limit) if limit else None


def write_model(
    model: PreTrainedModel,
    source: Path,
    target: Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write what `from_pretrained` loads; tokenizer and other small files come from `source`."""
    with _without_progress_bars():
        model.save_pretrained(target, state_dict=weights)
    for file in sorted(source.iterdir()):
        is_weights = file.name.endswith(_WEIGHTS)
        if file.is_file() and not is_weights and not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
