"""The engine's log-probs are those of a plain forward without a cache, however it batched."""

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.mistral import MistralConfig, MistralForCausalLM

from asyncflow_transformers.engine import EngineRequest, GenerationEngine
from asyncflow_transformers.forward import HfForward
from asyncflow_transformers.lean import LeanForward
from asyncflow_transformers.sampling import stream_states, uniforms

VOCAB = 48
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
MODELS = {
    "qwen3-tied-gqa": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)
    ),
    "qwen3-eager": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=8, attn_implementation="eager")
    ),
    "llama-untied": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, num_key_value_heads=4, attention_bias=True, mlp_bias=True)
    ),
    "qwen2-tied": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SMALL, num_key_value_heads=2, tie_word_embeddings=True)
    ),
    "mistral": lambda: MistralForCausalLM(
        MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=None)
    ),
}


def make_model(name="qwen3-tied-gqa", seed=0):
    torch.manual_seed(seed)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms start as constants, which would hide a missing one.
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def make_engine(model, *, slots=3, max_length=40, version=0, eos=(), forward=None, **kwargs):
    engine = GenerationEngine(
        model, slots=slots, max_length=max_length, version=version, eos_token_ids=eos, **kwargs
    )
    if forward == "own":
        engine._forward = HfForward(model, engine._cache, max_length=max_length)
    return engine


def make_requests(count, *, seed=0, **kwargs):
    rng = np.random.default_rng(seed)
    defaults = {"max_new_tokens": 12}
    return [
        EngineRequest(
            key=f"r{i}",
            prompt_ids=rng.integers(0, VOCAB, rng.integers(1, 14)).astype(np.int32),
            seed=1000 * seed + i,
            **(defaults | kwargs),
        )
        for i in range(count)
    ]


def run(engine, requests=()):
    for request in requests:
        engine.submit(request)
    done = {}
    while engine.has_work:
        for completion in engine.step():
            assert completion.key not in done
            done[completion.key] = completion
    return done


@torch.inference_mode()
def plain_logprobs(model, request, response_ids):
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, response_ids])).long()
    logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
    logprobs = (logits / (request.temperature or 1.0)).log_softmax(-1)
    at = torch.arange(request.prompt_ids.size - 1, ids.numel() - 1)
    return logprobs[at, ids[at + 1]].numpy()


def assert_exact(model, requests, done):
    assert set(done) == {request.key for request in requests}
    for request in requests:
        completion = done[request.key]
        assert completion.response_ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert completion.versions.dtype == np.int32
        assert completion.versions[:, 1].sum() == completion.response_ids.size
        np.testing.assert_allclose(
            completion.logprobs,
            plain_logprobs(model, request, completion.response_ids),
            atol=1e-5,
            rtol=0,
        )


def assert_same(first, second):
    np.testing.assert_array_equal(first.response_ids, second.response_ids)
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-5, rtol=0)
    assert first.finish_reason == second.finish_reason


@pytest.mark.parametrize("forward", ["chosen", "own"])
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_ragged_continuous_batching_equal_plain_forward(name, forward):
    model = make_model(name)
    engine = make_engine(model, slots=4, eos=(0, 1, 2), forward=forward)
    requests = make_requests(17)
    done = run(engine, requests)
    assert_exact(model, requests, done)
    assert {c.finish_reason for c in done.values()} == {"stop", "length"}


@pytest.mark.parametrize("name", MODELS)
def test_forward_choice_model_family_is_lean_where_it_fits(name):
    engine = make_engine(make_model(name))
    expected = HfForward if name == "mistral" else LeanForward
    assert isinstance(engine._forward, expected)


def test_forward_choice_replaced_linear_falls_back_and_stays_exact():
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 1.5 * super().forward(x)

    model = make_model()
    projection = Scaled(32, 64, bias=False)
    model.model.layers[1].mlp.up_proj = projection
    engine = make_engine(model)
    assert isinstance(engine._forward, HfForward)
    requests = make_requests(5)
    assert_exact(model, requests, run(engine, requests))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.6},
        {"temperature": 1.7, "top_p": 0.7},
        {"top_k": 3},
        {"min_p": 0.2, "top_p": 0.95, "top_k": 10},
        {"temperature": 0.0},
    ],
)
def test_logprobs_truncated_or_tempered_are_over_the_whole_vocabulary(sampling):
    model = make_model()
    requests = make_requests(6, **sampling)
    assert_exact(model, requests, run(make_engine(model), requests))


def test_greedy_any_seed_follows_the_argmax():
    model = make_model()
    (request,) = make_requests(1, temperature=0.0)
    completion = run(make_engine(model), [request])["r0"]
    ids = np.concatenate([request.prompt_ids, completion.response_ids])
    with torch.inference_mode():
        best = model(input_ids=torch.from_numpy(ids).long()[None]).logits[0].argmax(-1).numpy()
    np.testing.assert_array_equal(completion.response_ids, best[request.prompt_ids.size - 1 : -1])


def test_draws_other_batch_composition_repeat_by_seed():
    model = make_model()
    requests = make_requests(9)
    alone = {}
    for request in requests:
        alone |= run(make_engine(model, slots=1, eos=(0, 1)), [request])
    together = run(make_engine(model, slots=9, eos=(0, 1)), requests)
    backwards = run(make_engine(model, slots=2, eos=(0, 1)), requests[::-1])
    for request in requests:
        assert_same(alone[request.key], together[request.key])
        assert_same(alone[request.key], backwards[request.key])


def test_draws_plain_logits_are_the_inverse_cdf_at_the_response_index():
    model = make_model()
    requests = make_requests(4, temperature=0.9)
    done = run(make_engine(model, slots=2), requests)
    for request in requests:
        response = done[request.key].response_ids
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, response])).long()
        with torch.inference_mode():
            logits = model(input_ids=ids[None], use_cache=False).logits[0].double().numpy()
        probs = np.exp(logits[request.prompt_ids.size - 1 : -1] / 0.9)
        cdf = np.cumsum(probs, axis=1) / probs.sum(axis=1, keepdims=True)
        state = stream_states(np.array([request.seed], np.uint64))
        u = uniforms(state, np.arange(response.size))
        np.testing.assert_array_equal((cdf <= u[:, None]).sum(axis=1), response)


def test_draws_equal_seeds_and_prompts_draw_the_same_others_differ():
    model = make_model()
    prompt = np.array([5, 6, 7], np.int32)
    requests = [
        EngineRequest(key=i, prompt_ids=prompt, seed=seed, max_new_tokens=20)
        for i, seed in enumerate([3, 4, 3, 2**64 - 1])
    ]
    done = run(make_engine(model, slots=2), requests)
    assert_same(done[0], done[2])
    assert not np.array_equal(done[0].response_ids, done[1].response_ids)
    assert not np.array_equal(done[0].response_ids, done[3].response_ids)


def test_prefill_token_budget_small_changes_nothing():
    model = make_model()
    requests = make_requests(10)
    whole = run(make_engine(model, slots=8), requests)
    split = run(make_engine(model, slots=8, prefill_tokens=9), requests)
    for key, completion in whole.items():
        assert_same(completion, split[key])


def test_step_full_slots_admits_in_submission_order():
    engine = make_engine(make_model(), slots=2)
    for request in make_requests(5, max_new_tokens=2):
        engine.submit(request)
    assert (engine.num_running, engine.num_waiting) == (0, 5)
    ended = []
    while engine.has_work:
        ended += [c.key for c in engine.step()]
        assert engine.num_running <= 2
    assert ended == ["r0", "r1", "r2", "r3", "r4"]


def test_step_ended_sequence_slot_is_refilled_at_the_next_step():
    engine = make_engine(make_model(), slots=2)
    short, *rest = make_requests(3, max_new_tokens=9)
    engine.submit(EngineRequest(key="short", prompt_ids=short.prompt_ids, seed=0, max_new_tokens=1))
    for request in rest:
        engine.submit(request)
    assert [c.key for c in engine.step()] == ["short"]
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 0)


def test_step_without_work_returns_nothing():
    assert make_engine(make_model()).step() == []


def test_stop_token_ids_per_request_end_with_the_token_kept():
    model = make_model()
    (request,) = make_requests(1, max_new_tokens=20)
    free = run(make_engine(model), [request])["r0"].response_ids
    token = int(free[7])
    first = free.tolist().index(token)
    (stopped,) = make_requests(1, max_new_tokens=20, stop_token_ids=(token,))
    done = run(make_engine(model), [stopped])["r0"]
    assert done.finish_reason == "stop"
    np.testing.assert_array_equal(done.response_ids, free[: first + 1])


def test_stop_sequence_at_the_tail_ends_the_response():
    model = make_model()
    (request,) = make_requests(1, max_new_tokens=20)
    free = run(make_engine(model), [request])["r0"].response_ids.tolist()
    sequence = tuple(free[4:7])
    end = next(i for i in range(20) if tuple(free[max(0, i - 2) : i + 1]) == sequence)
    # The second one shares the last token but does not match; rows move between the slots.
    never = ((sequence[0] + 1) % VOCAB, sequence[-1])
    (stopping,) = make_requests(1, max_new_tokens=20, stop_sequences=(never, sequence))
    fillers = [
        EngineRequest(key=("f", i), prompt_ids=np.array([i]), seed=i, max_new_tokens=1 + i)
        for i in range(3)
    ]
    done = run(make_engine(model, slots=4), [*fillers, stopping])["r0"]
    assert done.finish_reason == "stop"
    assert done.response_ids.tolist() == free[: end + 1]


def test_stop_on_the_last_allowed_token_is_stop_not_length():
    model = make_model()
    (request,) = make_requests(1)
    last = int(run(make_engine(model), [request])["r0"].response_ids[-1])
    done = run(make_engine(model, eos=(last,)), [request])["r0"]
    assert done.finish_reason == "stop"


@pytest.mark.parametrize("forward", ["chosen", "own"])
def test_many_slots_uneven_lengths_compaction_stays_exact(forward):
    model = make_model()
    rng = np.random.default_rng(2)
    requests = [
        EngineRequest(
            key=i,
            prompt_ids=rng.integers(0, VOCAB, rng.integers(1, 12)).astype(np.int32),
            seed=i,
            max_new_tokens=int(rng.integers(1, 28)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_p=float(rng.choice([0.6, 1.0])),
            stop_token_ids=(3,) if i % 2 else (),
        )
        for i in range(40)
    ]
    done = run(make_engine(model, slots=16, forward=forward), requests)
    assert_exact(model, requests, done)
    for request in requests[::7]:
        alone = run(make_engine(model, slots=1, forward=forward), [request])
        assert_same(alone[request.key], done[request.key])
