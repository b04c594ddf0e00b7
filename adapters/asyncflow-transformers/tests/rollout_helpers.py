"""Models, requests and weight sources that the service's tests share."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from asyncflow_core.batch import Key
from asyncflow_core.parts import PartContext
from asyncflow_core.services.rollout import GenerateRequest, SamplingParams
from asyncflow_core.services.weight_sync import Bucket, TensorSpec, WeightSource
from asyncflow_core.testing.aio import manifest_of, stream
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


def make_requests(count, *, first=0, prompt=(3, 1, 2), **sampling):
    params = SamplingParams(**{"max_new_tokens": 8, **sampling})
    return [
        GenerateRequest(Key(0, 0, 0, sample), np.array(prompt, np.int32), params, 100 + sample)
        for sample in range(first, first + count)
    ]


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
    tensors = [(name, param.detach()) for name, param in model.named_parameters()]
    tied = {}
    if model.config.tie_word_embeddings:
        tied["model.embed_tokens.weight"] = ("lm_head.weight",)
    buckets = []
    for start in range(0, len(tensors), per_bucket):
        specs, parts, offset = [], [], 0
        for name, tensor in tensors[start : start + per_bucket]:
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().copy()
            shape, aliases = tuple(tensor.shape), tied.get(name, ())
            specs.append(TensorSpec(name, "F32", shape, offset, aliases))
            parts.append(data)
            offset += len(data)
        buckets.append(Bucket(tuple(specs), np.concatenate(parts)))
    return buckets


def make_source(buckets, version):
    return WeightSource(manifest_of(buckets, version), buckets=stream(buckets))


async def switch(service, model_dir, version, mode):
    buckets = make_buckets(versioned_model(model_dir, version))
    await service.stage_weights(make_source(buckets, version))
    await service.commit_weights(version, mode)


def plain_logprobs(model, prompt, response, temperature=1.0):
    ids = torch.tensor([[*prompt, *response.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    every = logits.log_softmax(-1)
    return every.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
