"""Models, requests and weight sources that the service's tests share."""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from asyncflow_core.parts import PartContext
from asyncflow_core.testing import generation
from asyncflow_core.testing.generation import float32_buckets, response_logprobs, switch_to
from asyncflow_transformers.options import RolloutOptions
from asyncflow_transformers.service import TransformersRollout

VOCAB = 48
LENGTH = 700


def tiny_qwen3(seed=0, *, tied=True):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=LENGTH,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def make_rollout(model_dir, *, context=None, **options):
    chosen = RolloutOptions(model=str(model_dir), **{"slots": 8, **options})
    return TransformersRollout(chosen, context or PartContext(name="rollout"))


def make_requests(count, *, prompt=(3, 1, 2), **options):
    return generation.make_requests(count, prompt=prompt, **options)


def versioned_model(model_dir, version):
    """The model with other weights for each version; 0 is what the directory holds."""
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    torch.manual_seed(version)
    if version:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.05 * torch.randn_like(param))
    return model


def make_buckets(model, *, per_bucket=5):
    tensors = {name: param.detach().numpy() for name, param in model.named_parameters()}
    tied = model.config.tie_word_embeddings
    aliases = {"model.embed_tokens.weight": ("lm_head.weight",)} if tied else {}
    return float32_buckets(tensors, aliases=aliases, per_bucket=per_bucket)


async def switch(service, model_dir, version, mode):
    await switch_to(service, make_buckets(versioned_model(model_dir, version)), version, mode)


def plain_logprobs(model, prompt, response, temperature=1.0):
    ids = torch.tensor([[*prompt, *response.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return response_logprobs(logits, response, temperature=temperature)
