"""Other model families: heads that do more than a matrix product fall back to full logits."""

import numpy as np
import pytest
import torch
from hzp_helpers import POLICY, VOCAB, make_batch, make_trainer, plain_logprobs
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
)

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "gemma2": (
        lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=2.0)),
        False,
    ),
    "granite": (lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)), False),
    "gpt2": (
        lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4)
        ),
        True,
    ),
}


@pytest.mark.parametrize("name", sorted(MODELS))
async def test_logprobs_equal_the_models_own(tmp_path, name):
    build, direct = MODELS[name]
    torch.manual_seed(0)
    build().save_pretrained(tmp_path / name)
    batch = make_batch(8)
    async with make_trainer(tmp_path / name, micro_batch_tokens=40) as trainer:
        assert trainer._engine._forward._direct is direct
        found = await trainer.forward(batch)
        await trainer.forward_backward(batch, POLICY, last=True)
        assert (await trainer.optim_step()).grad_norm > 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
    for row in range(batch.rows):
        expected = plain_logprobs(model, batch, row)
        np.testing.assert_allclose(found["logprobs"][row], expected, atol=1e-5)
