"""What a user may set, checked without importing torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

__all__ = ["HzpOptions", "check_options"]


Preset = Literal["auto", "ddp", "zero1", "zero2", "zero3", "hsdp", "hpz"]


class HzpOptions(BaseModel):
    """Options of the `hzp` trainer."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    model: str
    """Directory of a Hugging Face causal language model."""
    frozen: bool = False
    """Only `forward` and exports: no gradients, no optimizer state, no float32 copy of the weights.
    For a reference model."""
    lr: float = Field(default=1e-6, ge=0)
    """Learning rate after warm-up. 1e-6 suits models of billions of parameters; tiny ones take
    5e-4."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the gradient's mean and square."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's denominator guard."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of tensors with two axes or more; biases and norms never decay."""
    grad_clip: float | None = Field(default=1.0, gt=0)
    """Largest norm of the mean gradient; null does not clip."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the learning rate climbs linearly to `lr`; a shorter run only climbs."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes after warm-up; linear and cosine reach 0 at `total_updates`."""
    total_updates: int | None = Field(default=None, ge=1)
    """Updates of the whole run; linear and cosine need it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward, the backward and the exported weights. Gradients are summed, and the weights
    updated, in float32 either way."""
    device: str = "auto"
    """"auto" is this rank's CUDA device where there is one, else the CPU."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Padded tokens in one forward; a larger batch is split, which changes nothing but memory."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward: less memory, about a third more time."""
    compile: bool = False
    """Compile the decoder with torch.compile; needs a C++ compiler and whole parameters (z3 of 1),
    pays off on large models."""
    sharding: (
        tuple[int, int, int] | Literal["auto", "ddp", "zero1", "zero2", "zero3", "hsdp", "hpz"]
    ) = "auto"
    """Over how many neighbouring ranks parameters, gradients and optimizer state are split:
    [z3, z2, z1], a preset (ddp, zero1, zero2, zero3; hsdp and hpz split parameters inside a node),
    or "auto", the fastest by the cost model that fits `memory_bytes`."""
    memory_bytes: int | None = Field(default=None, ge=1)
    """Most that "auto" lets weights, gradients and optimizer state take on a rank; null is 80% of
    the device's memory."""
    node_size: int | None = Field(default=None, ge=1)
    """Neighbouring ranks with fast links; null takes LOCAL_WORLD_SIZE."""
    gather_slots: int = Field(default=3, ge=2)
    """Layers whose parameters are gathered at a time; more move fewer bytes, take more memory."""
    accumulate: Literal["full", "shard"] = "full"
    """Where gradients of an update's micro-batches add up: "full" keeps them whole and reduces
    once; "shard" reduces every micro-batch, and holds a part."""
    threads: int = Field(default=1, ge=1)
    """Threads of CPU operations."""
    bucket_bytes: int = Field(default=64 * 2**20, ge=1)
    """Size of an exported bucket; a larger tensor gets a bucket of its own."""
    sharded_export: bool = False
    """Whether every rank exports a share of the weights, so that they leave all hosts at once; else
    rank 0 exports all. Needs a weight transport of buckets."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for another rank before the call fails."""
    engine_args: Mapping[str, Any] = Field(default_factory=dict)
    """Passed untouched to `AutoModelForCausalLM.from_pretrained`."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule != "constant" and self.total_updates is None:
            raise ValueError(f"schedule {self.schedule!r} needs total_updates")
        return self

    @field_validator("betas")
    @classmethod
    def _check_betas(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are {list(betas)}; each must be at least 0 and below 1")
        return betas


def check_options(options: HzpOptions) -> Iterator[str]:
    """The faults that can be seen without loading the model."""
    path = Path(options.model)
    if not path.is_dir():
        yield f"model {options.model!r} is no directory; give the path of a Hugging Face model"
    elif not (path / "config.json").is_file():
        yield f"model {options.model!r} has no config.json; give the path of a Hugging Face model"
    elif not any(path.glob("*.safetensors")):
        yield f"model {options.model!r} has no *.safetensors; save it with save_pretrained"
    if options.compile and isinstance(options.sharding, tuple) and options.sharding[0] > 1:
        yield (
            f"compile does not go with sharded parameters {list(options.sharding)}: a compiled "
            f"decoder needs them all at its start; set compile to false, or z3 to 1"
        )
