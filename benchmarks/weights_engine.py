"""What `benchmarks/weights.py` measures on the real engines: pauses and deltas."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow_core.batch import Batch, Column, Key
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registry
from asyncflow_core.services.rollout import GenerateRequest, SamplingParams, SwitchMode
from asyncflow_core.services.weight_sync import (
    ManifestBuilder,
    TensorSpec,
    WeightManifest,
    WeightSource,
)

BASE = Path(__file__).resolve().parents[1] / "examples" / "spell_backward" / "base"
SWITCHES = 6


async def pause_ms(gb: float, run_dir: Path) -> dict[str, float]:
    """Time the engine's thread spends between two tokens while weights are exchanged.

    Compared with the time between two tokens without a switch. The model has random weights, four
    layers whatever its size, and generates all the while.
    """
    del run_dir
    from asyncflow_transformers.options import RolloutOptions
    from asyncflow_transformers.service import TransformersRollout

    folder = Path(tempfile.mkdtemp())
    try:
        await asyncio.to_thread(_save_model, gb, folder)
        options = RolloutOptions(model=str(folder), slots=2, max_length=2000)
        async with TransformersRollout(options, PartContext("bench")) as rollout:
            return await _switches(rollout, folder)
    finally:
        shutil.rmtree(folder)


def _save_model(gb: float, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    width = max(64, round((gb * 1e9 / 4 / 4 / 12) ** 0.5 / 64) * 64)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=8 * width // 3 // 64 * 64,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


async def _switches(rollout: Any, folder: Path) -> dict[str, float]:
    spans = _watch(rollout)
    sampling = SamplingParams(max_new_tokens=1900)
    requests = [
        GenerateRequest(Key(0, 0, 0, n), np.array([1, 2, 3], np.int32), sampling, n)
        for n in range(2)
    ]
    running = asyncio.ensure_future(_drain(rollout.generate(requests)))
    manifest = _manifest_of(folder)
    for version in range(1, SWITCHES + 1):
        staged = await rollout.stage_weights(WeightSource(manifest(version), path=str(folder)))
        assert staged.checksum == manifest(version).checksum
        before = len(spans["step"])
        await rollout.commit_weights(version, SwitchMode.IN_FLIGHT)
        while len(spans["step"]) < before + 3 and not running.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return {
        "pause_ms": 1e3 * statistics.median(spans["switch"]),
        "worst_ms": 1e3 * max(spans["switch"]),
        "token_ms": 1e3 * statistics.median(spans["step"]),
    }


def _watch(rollout: Any) -> dict[str, list[float]]:
    """Seconds of every step, and of the gaps between two steps in which weights changed."""
    spans: dict[str, list[float]] = {"step": [], "switch": []}
    loop = rollout._loop
    step, swap = loop.engine.step, loop._on_swap
    state = {"ended": 0.0, "switched": False}

    def timed_step() -> Any:
        start = time.perf_counter()
        if state["switched"]:
            spans["switch"].append(start - state["ended"])
            state["switched"] = False
        found = step()
        state["ended"] = time.perf_counter()
        spans["step"].append(state["ended"] - start)
        return found

    def watched_swap(*arguments: Any, **more: Any) -> None:
        swap(*arguments, **more)
        state["switched"] = True

    loop.engine.step, loop._on_swap = timed_step, watched_swap
    return spans


async def _drain(completions: AsyncIterator[Any]) -> None:
    async for _ in completions:
        pass


def _manifest_of(folder: Path) -> Any:
    from asyncflow_weights_host.disk import read_file, safetensors_files

    buckets = [read_file(path) for path in safetensors_files(folder)]
    builder = ManifestBuilder(0, 0)
    for bucket in buckets:
        builder.add(bucket)
    found = builder.build()
    return lambda version: WeightManifest(version, 0, found.tensors, found.checksum, found.nbytes)


async def demo_delta_shares() -> dict[str, float]:
    """Bytes of a delta over bytes of the model, after a few steps of the demo's trainer.

    Rows are random, the model, the optimizer and the learning rate are the demo's. bfloat16 is what
    a delta between the same two states, rounded, would take.
    """
    from asyncflow_weights_host import delta

    if not BASE.is_dir():
        raise SystemExit("benchmarks/weights.py needs the demo's base model; run `make demo` first")
    registry = Registry()
    found = registry.get("trainer", "hzp")
    options = found.parse_options({"model": str(BASE), "lr": 8.0e-4})
    context = PartContext("trainer", registry=registry)
    states: list[dict[str, tuple[TensorSpec, Any]]] = []
    async with found.factory(options, context) as trainer:
        for step in range(6):
            for micro in range(2):
                await trainer.forward_backward(_rows(10 * step + micro), "ppo_clip", last=False)
            await trainer.optim_step()
            states.append(
                {
                    spec.name: (spec, bucket.tensor_bytes(spec).copy())
                    async for bucket in trainer.export_weights(step)
                    for spec in bucket.specs
                }
            )
    shares = {"float32": 0, "bfloat16": 0}
    total = 0
    for name, (spec, new) in states[-1].items():
        old = states[-2][name][1]
        plain = TensorSpec(name, "F32", spec.shape)
        half = TensorSpec(name, "BF16", spec.shape)
        shares["float32"] += len(delta.encode(old, new, [plain]))
        shares["bfloat16"] += 2 * len(delta.encode(_rounded(old), _rounded(new), [half]))
        total += len(new)
    return {name: moved / total for name, moved in shares.items()}


def _rounded(values: Any) -> Any:
    import torch

    as_float = torch.from_numpy(values).view(torch.float32)
    return as_float.to(torch.bfloat16).view(torch.uint8).numpy()


def _rows(seed: int, rows: int = 256) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 9, rows)
    sampling = {"max_new_tokens": 8, "temperature": 1.0}

    def per_token(make: Any, dtype: Any) -> Column:
        return Column.ragged([make(int(n)) for n in lengths], dtype)

    return Batch(
        {
            "prompt_ids": Column.ragged([rng.integers(1, 27, 6) for _ in lengths], np.int32),
            "response_ids": per_token(lambda n: rng.integers(1, 27, n), np.int32),
            "loss_mask": per_token(lambda n: np.ones(n), np.uint8),
            "behaviour_logprobs": per_token(lambda n: -3 * rng.random(n), np.float32),
            "advantages": per_token(rng.standard_normal, np.float32),
            "versions": Column.ragged([[[0, int(n)]] for n in lengths], np.int32),
            "sampling": Column.objects([sampling] * rows),
        }
    )


__all__ = ["demo_delta_shares", "pause_ms"]
