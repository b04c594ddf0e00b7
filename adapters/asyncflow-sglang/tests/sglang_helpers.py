"""Models, requests, weights and servers that the tests share."""

import functools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from asyncflow_core.parts import PartContext
from asyncflow_core.testing import generation
from asyncflow_core.testing.generation import float32_buckets, response_logprobs, switch_to
from asyncflow_sglang.options import SGLangOptions
from asyncflow_sglang.service import SGLangRollout

ROOT = Path(__file__).parents[3]
VOCAB = 96
PROMPT = (3, 1, 2, 7)
SMALL = {"max_total_tokens": 32768, "max_running_requests": 64, "dtype": "float32"}


def server_python():
    """The interpreter with SGLang in it; the test is skipped where there is none."""
    chosen = Path(os.environ.get("SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
    if not chosen.exists():
        pytest.skip(f"there is no SGLang at {chosen}; make test-sglang installs it")
    return str(chosen)


CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def tiny_model(kind="qwen2", *, seed=0, tied=False):
    torch.manual_seed(seed)
    config = CONFIGS[kind](
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tiny_qwen2(seed=0, *, tied=False):
    return tiny_model(seed=seed, tied=tied)


def save_model(path, kind="qwen2", **options):
    """The model and a tokenizer of words `t0 t1 ...`, one a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tiny_model(kind, **options).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


def make_options(model, **options):
    engine_args = {**SMALL, **options.pop("engine_args", {})}
    if "addresses" not in options:
        options = {"python": server_python(), "device": "cpu", **options}
    return SGLangOptions(model=str(model), engine_args=engine_args, poll_s=0.2, **options)


def make_rollout(model, *, context=None, **options):
    return SGLangRollout(make_options(model, **options), context or PartContext(name="rollout"))


def make_requests(count, *, prompt=PROMPT, **options):
    return generation.make_requests(count, prompt=prompt, **options)


@functools.cache
def versioned_model(model, version):
    """The model with other weights for each version; 0 is what the directory holds."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    torch.manual_seed(version)
    if version:
        with torch.no_grad():
            for param in loaded.parameters():
                param.add_(0.05 * torch.randn_like(param))
    return loaded


def make_buckets(model, *, per_bucket=5):
    tensors = {name: param.detach().numpy() for name, param in model.named_parameters()}
    tied = model.config.tie_word_embeddings
    aliases = {"model.embed_tokens.weight": ("lm_head.weight",)} if tied else {}
    return float32_buckets(tensors, aliases=aliases, per_bucket=per_bucket)


async def switch(service, model, version, mode):
    await switch_to(service, make_buckets(versioned_model(model, version)), version, mode)


def plain_logprobs(model, prompt, response, temperature=1.0):
    """Of a response, by one transformers forward; [T]."""
    ids = torch.tensor([[*prompt, *map(int, response)]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return response_logprobs(logits, list(map(int, response)), temperature=temperature)


def assert_exact(model, completion, prompt=PROMPT, *, start=0, stop=None, temperature=1.0):
    expected = plain_logprobs(model, prompt, completion.response_ids, temperature)
    found = completion.behaviour_logprobs
    np.testing.assert_allclose(found[start:stop], expected[start:stop], atol=1e-5)
