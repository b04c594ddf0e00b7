"""What the engine refuses, in which words, and what it just about accepts."""

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM, T5Config
from transformers.models.bloom import BloomConfig, BloomForCausalLM
from transformers.models.gemma3 import Gemma3ForCausalLM
from transformers.models.mamba import MambaConfig, MambaForCausalLM
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from transformers.models.t5 import T5ForConditionalGeneration

from asyncflow_transformers.engine import EngineRequest, GenerationEngine

VOCAB = 48


def make_config(**kwargs):
    defaults = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
    }
    return Qwen3Config(**(defaults | kwargs))


def make_model(seed=0, **kwargs):
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(make_config(**kwargs)).eval()


def make_engine(model, *, slots=3, version=0, eos=(), max_length=40):
    return GenerationEngine(
        model, slots=slots, max_length=max_length, version=version, eos_token_ids=eos
    )


def make_request(key="a", prompt=(1, 2, 3), **kwargs):
    defaults = {"seed": 7, "max_new_tokens": 12}
    return EngineRequest(key=key, prompt_ids=np.array(prompt, np.int32), **(defaults | kwargs))


def drain(engine):
    done = {}
    while engine.has_work:
        done |= {completion.key: completion for completion in engine.step()}
    return done


def run(engine, requests):
    for request in requests:
        engine.submit(request)
    return drain(engine)


@torch.inference_mode()
def plain_logprobs(model, request, response_ids):
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, response_ids])).long()
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    at = torch.arange(request.prompt_ids.size - 1, ids.numel() - 1)
    return (logits / request.temperature).log_softmax(-1)[at, ids[at + 1]].numpy()


def close(first, second):
    np.testing.assert_allclose(first, second, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ()}, "prompt_ids is empty"),
        ({"prompt": (1, VOCAB)}, "prompt_ids holds token 48, allowed: 0..47"),
        ({"prompt": (1, -2)}, "prompt_ids holds token -2"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 38}, "3 tokens . max_new_tokens 38 is 41, allowed: at most .* 40"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1e-9}, "temperature is 1e-09"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"stop_token_ids": (99,)}, "stop tokens hold token 99"),
        ({"stop_sequences": ((1,), ())}, "empty sequence"),
        ({"prefix_logprobs": np.zeros(2, np.float32)}, "without prefix_ids"),
        ({"prefix_ids": np.zeros(12, np.int32)}, "fewer than max_new_tokens 12"),
        ({"prefix_ids": np.zeros(2, np.int32)}, r"prefix_logprobs has shape None, allowed: \(2,\)"),
        (
            {
                "prefix_ids": np.zeros(2, np.int32),
                "prefix_logprobs": np.zeros(2, np.float32),
                "prefix_versions": np.array([[0, 3]], np.int32),
            },
            "counts 3 tokens, prefix_ids has 2",
        ),
    ],
)
def test_submit_bad_value_names_key_value_and_allowed(change, message):
    engine = make_engine(make_model())
    with pytest.raises(ValueError, match=f"request 'a': .*{message}"):
        engine.submit(make_request(**change))
    assert not engine.has_work


def test_submit_prompt_of_wrong_dtype_is_refused():
    engine = make_engine(make_model())
    request = EngineRequest(key="a", prompt_ids=np.array([0.5]), seed=0, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"request 'a': prompt_ids must be .* integer .*float64"):
        engine.submit(request)


def test_submit_key_in_use_is_refused_and_free_again_afterwards():
    engine = make_engine(make_model(), slots=1)
    engine.submit(make_request())
    with pytest.raises(ValueError, match="request 'a': key is already waiting or running"):
        engine.submit(make_request())
    drain(engine)
    engine.submit(make_request())
    assert engine.num_waiting == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"max_length": 1}, "max_length is 1"),
        ({"version": -1}, "version is -1"),
        ({"eos": (VOCAB,)}, "eos_token_ids holds 48"),
        ({"max_length": 65}, "'qwen3'.*max_length is 65.*max_position_embeddings 64"),
    ],
)
def test_engine_bad_value_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_engine(make_model(), **change)


def tiny_gemma():
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return Gemma3ForCausalLM(config)


def tiny_windowed_qwen():
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=16,
        max_window_layers=1,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def tiny_t5():
    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
    return T5ForConditionalGeneration(config)


def tiny_mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1))


def tiny_bloom():
    return BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2))


def tiny_meta():
    with torch.device("meta"):
        return make_model()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (tiny_gemma, "'gemma3_text'.*sliding_attention layers with sliding_window 8"),
        (tiny_windowed_qwen, "'qwen2'.*sliding_attention layers with sliding_window 16"),
        (tiny_t5, "'t5'.*encoder-decoder"),
        (tiny_mamba, "'mamba'.*recurrent"),
        (tiny_bloom, "'bloom'.*position_ids"),
        (tiny_meta, "'qwen3'.*weights are on meta"),
    ],
)
def test_engine_model_it_cannot_serve_is_refused_with_the_supported(make, message):
    with pytest.raises(ValueError, match=f"{message}.*supported are decoder-only"):
        make_engine(make())


def test_engine_window_of_max_length_is_served_exactly():
    torch.manual_seed(0)
    config = tiny_gemma().config
    config.sliding_window = 40
    config.initializer_range = 0.3
    model = Gemma3ForCausalLM(config).eval()
    request = make_request(max_new_tokens=37)
    completion = run(make_engine(model), [request])["a"]
    close(completion.logprobs, plain_logprobs(model, request, completion.response_ids))


def test_engine_flash_attention_is_refused():
    model = make_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2', allowed: 'sdpa' or 'eager'"):
        make_engine(model)


def test_engine_model_in_train_mode_is_put_into_eval():
    model = make_model(attention_dropout=0.5).train()
    request = make_request()
    completion = run(make_engine(model), [request])["a"]
    assert not model.training
    close(completion.logprobs, plain_logprobs(model, request, completion.response_ids))
