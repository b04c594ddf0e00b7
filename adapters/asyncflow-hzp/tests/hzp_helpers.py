"""Models, batches and losses that the tests share."""

import socket
from dataclasses import replace
from types import ModuleType

import numpy as np
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3Config, Qwen3ForCausalLM

from asyncflow_core.batch import Batch, Column
from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registry
from asyncflow_core.services.trainer import LossCapabilities, LossOutput, LossSpec
from asyncflow_hzp.options import HzpOptions
from asyncflow_hzp.service import HzpTrainer

VOCAB = 64
POLICY = LossSpec("policy")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tiny_qwen3(**changes):
    config = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        **changes,
    }
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**config))


def tiny_moe(**changes):
    """Experts, a dense layer before them, and a router with a buffer that checkpoints hold."""
    config = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        **changes,
    }
    torch.manual_seed(0)
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**config))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-1, 1, len(buffer)))
    return model


def make_batch(rows=6, seed=0, *, temperature=1.0, longest=8):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 7)) for _ in range(rows)]
    responses = [rng.integers(0, VOCAB, rng.integers(1, longest + 1)) for _ in range(rows)]
    sampling = {"max_new_tokens": longest, "temperature": temperature, "top_p": 1.0}

    def per_token(values, dtype):
        return Column.ragged([values(len(r)) for r in responses], dtype)

    return Batch(
        {
            "prompt_ids": Column.ragged(prompts, np.int32),
            "response_ids": Column.ragged(responses, np.int32),
            "loss_mask": per_token(lambda n: rng.integers(0, 2, n), np.uint8),
            "behaviour_logprobs": per_token(lambda n: -rng.random(n), np.float32),
            "advantages": per_token(rng.standard_normal, np.float32),
            "sampling": Column.objects([sampling] * rows),
        }
    )


def _policy(logprobs, columns, config):
    ratio = (logprobs - columns["behaviour_logprobs"]).exp()
    mask = columns["loss_mask"].float()
    total = -(ratio * columns["advantages"] * mask).sum()
    weight = float(mask.sum())
    return LossOutput(total, weight, {"ratio": ((ratio * mask).sum(), weight)})


def _entropy(logprobs, columns, config):
    assert columns["entropy"].requires_grad
    return LossOutput(-columns["entropy"].sum(), float(len(logprobs)))


def _nan(logprobs, columns, config):
    # sqrt(0) is finite, its gradient is not.
    return LossOutput((logprobs - logprobs.detach()).sqrt().sum(), 1.0)


def _detached(logprobs, columns, config):
    return LossOutput(logprobs.detach().sum(), 1.0)


def losses_module():
    module = ModuleType("hzp_test_losses")

    @hookimpl
    def asyncflow_register(registrar):
        reads = ("behaviour_logprobs", "advantages")
        for name, loss, able in (
            ("policy", _policy, LossCapabilities("torch", reads)),
            ("entropy", _entropy, LossCapabilities("torch", needs_entropy=True)),
            ("nan", _nan, LossCapabilities("torch")),
            ("detached", _detached, LossCapabilities("torch")),
            ("numpy", _policy, LossCapabilities("numpy", reads)),
        ):
            registrar.add(
                "loss", name, lambda o, c, loss=loss: loss, api_version=1, capabilities=able
            )

    module.asyncflow_register = asyncflow_register
    return module


def make_trainer(model_dir, *, context=None, **options):
    registry = Registry([])
    registry.add(losses_module())
    chosen = HzpOptions(model=str(model_dir), **{"lr": 1e-2, "weight_decay": 0.1, **options})
    context = replace(context or PartContext(name="trainer"), registry=registry)
    return HzpTrainer(chosen, context)


async def weights_of(trainer):
    """Name to bytes of everything exported."""
    found = {}
    async for bucket in trainer.export_weights(0):
        for spec in bucket.specs:
            found[spec.name] = (spec, bucket.tensor_bytes(spec).tobytes())
    return found


def plain_logprobs(model, batch, row, temperature=1.0):
    """From the model's own logits of one row alone."""
    prompt, response = batch["prompt_ids"][row], batch["response_ids"][row]
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    every = logits.log_softmax(-1)
    return every.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
