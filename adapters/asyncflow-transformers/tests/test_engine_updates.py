"""Weight updates under way, partial responses continued, broken weights."""

import copy

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

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


def make_requests(count, **kwargs):
    rng = np.random.default_rng(1)
    return [
        make_request(i, rng.integers(0, VOCAB, 1 + 2 * i), seed=i, **kwargs) for i in range(count)
    ]


def resume(request, partial):
    return EngineRequest(
        key=request.key,
        prompt_ids=request.prompt_ids,
        seed=request.seed,
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        prefix_ids=partial.response_ids,
        prefix_logprobs=partial.logprobs,
        prefix_versions=partial.versions,
    )


def drain(engine):
    done = {}
    while engine.has_work:
        done |= {completion.key: completion for completion in engine.step()}
    return done


def run(engine, requests):
    for request in requests:
        engine.submit(request)
    return drain(engine)


def swap(model, source):
    with torch.no_grad():
        for mine, other in zip(model.parameters(), source.parameters(), strict=True):
            mine.copy_(other)


@torch.inference_mode()
def plain_logprobs(model, request, response_ids):
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, response_ids])).long()
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    at = torch.arange(request.prompt_ids.size - 1, ids.numel() - 1)
    return (logits / request.temperature).log_softmax(-1)[at, ids[at + 1]].numpy()


def close(first, second):
    np.testing.assert_allclose(first, second, atol=1e-5, rtol=0)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_partial_aborted_and_resumed_equals_straight_run(steps):
    model = make_model()
    requests = make_requests(5, temperature=0.8)
    straight = run(make_engine(model), requests)
    engine = make_engine(model)
    for request in requests:
        engine.submit(request)
    for _ in range(steps):
        assert engine.step() == []
    partials = {partial.key: partial for partial in engine.abort()}
    assert not engine.has_work
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert set(partials) == {request.key for request in requests}
    assert {partial.finish_reason for partial in partials.values()} == {"abort"}
    assert [partials[i].response_ids.size for i in range(5)] == [steps] * 3 + [0] * 2
    assert partials[4].versions.shape == (0, 2)
    resumed = run(
        make_engine(model, slots=2), [resume(r, partials[r.key]) for r in reversed(requests)]
    )
    for request in requests:
        both = straight[request.key], resumed[request.key]
        np.testing.assert_array_equal(both[0].response_ids, both[1].response_ids)
        close(both[0].logprobs, both[1].logprobs)
        close(both[1].logprobs, plain_logprobs(model, request, both[1].response_ids))


def test_partial_resumed_at_a_new_version_keeps_its_runs():
    old, new = make_model(0), make_model(1)
    request = make_request()
    engine = make_engine(old, version=3)
    engine.submit(request)
    for _ in range(4):
        engine.step()
    (partial,) = engine.abort()
    assert partial.versions.tolist() == [[3, 4]]
    (again,) = (c for c in run(make_engine(new, version=5), [resume(request, partial)]).values())
    assert again.versions.tolist() == [[3, 4], [5, 8]]
    np.testing.assert_array_equal(again.response_ids[:4], partial.response_ids)
    close(again.logprobs[:4], plain_logprobs(old, request, again.response_ids)[:4])
    # A resumed prefix is prefilled with the new weights, so the rest is exactly theirs.
    close(again.logprobs[4:], plain_logprobs(new, request, again.response_ids)[4:])


def test_abort_some_keys_leaves_the_others_exact():
    model = make_model()
    requests = make_requests(6)
    straight = run(make_engine(model), requests)
    engine = make_engine(model, slots=4)
    for request in requests:
        engine.submit(request)
    engine.step()
    partials = engine.abort([0, 2, 5, "ended long ago"])
    assert [partial.key for partial in partials] == [0, 2, 5]
    assert (engine.num_running, engine.num_waiting) == (2, 1)
    done = drain(engine)
    assert set(done) == {1, 3, 4}
    for key, completion in done.items():
        np.testing.assert_array_equal(completion.response_ids, straight[key].response_ids)
        close(completion.logprobs, straight[key].logprobs)


def test_abort_waiting_resumed_request_returns_its_prefix():
    model = make_model()
    engine = make_engine(model, slots=1)
    engine.submit(make_request("runs"))
    request = make_request(
        "waits",
        prefix_ids=np.array([4, 5], np.int32),
        prefix_logprobs=np.array([-1.0, -2.0], np.float32),
        prefix_versions=np.array([[1, 1], [2, 1]], np.int32),
    )
    engine.submit(request)
    engine.step()
    (partial,) = engine.abort(["waits"])
    assert partial.response_ids.tolist() == [4, 5]
    assert partial.logprobs.tolist() == [-1.0, -2.0]
    assert partial.versions.tolist() == [[1, 1], [2, 1]]


@pytest.mark.parametrize("recompute", [False, True])
def test_update_in_flight_tokens_carry_the_version_that_made_them(recompute):
    old, new = make_model(0), make_model(1)
    live = copy.deepcopy(old)
    engine = make_engine(live, slots=4, version=10)
    requests = make_requests(6)
    for request in requests:
        engine.submit(request)
    for _ in range(5):
        engine.step()
    swap(live, new)
    engine.set_version(11)
    if recompute:
        engine.recompute_cache()
    done = drain(engine)
    for key, request in enumerate(requests):
        completion = done[key]
        if key >= 4:
            # Admitted after the update: nothing of the old weights is in it.
            assert completion.versions.tolist() == [[11, 12]]
            close(completion.logprobs, plain_logprobs(new, request, completion.response_ids))
            continue
        assert completion.versions.tolist() == [[10, 5], [11, 7]]
        close(completion.logprobs[:5], plain_logprobs(old, request, completion.response_ids)[:5])
        expected = plain_logprobs(new, request, completion.response_ids)[5:]
        if recompute:
            close(completion.logprobs[5:], expected)
        else:
            # The keys and values of the old weights were kept.
            assert np.abs(completion.logprobs[5:] - expected).max() > 1e-3


def test_update_in_flight_kept_cache_equals_a_mixed_cache_forward():
    old, new = make_model(0), make_model(1)
    live = copy.deepcopy(old)
    engine = make_engine(live, slots=1)
    request = make_request()
    engine.submit(request)
    for _ in range(5):
        engine.step()
    swap(live, new)
    engine.set_version(1)
    completion = drain(engine)[request.key]
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.response_ids])).long()
    with torch.inference_mode():
        # transformers' own cache: old weights up to the pending token, new ones from there.
        cut = request.prompt_ids.size + 4
        cache = old(input_ids=ids[None, :cut], use_cache=True).cache
        logits = new(input_ids=ids[None, cut:], cache=cache, use_cache=True).logits[0]
    logprobs = logits[:-1].log_softmax(-1).gather(-1, ids[cut + 1 :, None])[:, 0]
    close(completion.logprobs[5:], logprobs.numpy())


def test_update_by_new_parameter_objects_is_seen():
    old, new = make_model(0), make_model(1)
    engine = make_engine(old)
    request = make_request()
    engine.submit(request)
    engine.step()
    old.load_state_dict(new.state_dict(), assign=True)
    engine.set_version(1)
    engine.recompute_cache()
    completion = drain(engine)[request.key]
    close(completion.logprobs[1:], plain_logprobs(new, request, completion.response_ids)[1:])


def test_recompute_cache_same_weights_changes_nothing():
    model = make_model()
    requests = make_requests(7)
    plain = run(make_engine(model, eos=(0, 1)), requests)
    engine = make_engine(model, eos=(0, 1))
    engine.recompute_cache()
    for request in requests:
        engine.submit(request)
    done = {}
    while engine.has_work:
        done |= {completion.key: completion for completion in engine.step()}
        engine.recompute_cache()
    for key, completion in plain.items():
        np.testing.assert_array_equal(completion.response_ids, done[key].response_ids)
        close(completion.logprobs, done[key].logprobs)


def test_step_broken_weights_names_the_request_and_recovers():
    model = make_model()
    good = copy.deepcopy(model)
    engine = make_engine(model)
    request = make_request("poor")
    engine.submit(request)
    engine.step()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"'poor'.*version 0"):
        engine.step()
    swap(model, good)
    engine.recompute_cache()
    completion = drain(engine)["poor"]
    assert completion.response_ids.size == 12
    close(completion.logprobs, plain_logprobs(good, request, completion.response_ids))


def test_abort_all_after_broken_weights_leaves_a_clean_cache():
    model = make_model()
    good = copy.deepcopy(model)
    engine = make_engine(model, slots=2)
    for key in ("first", "second"):
        engine.submit(make_request(key, tuple(range(20))))
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="'first'"):
        engine.step()
    engine.abort()
    swap(model, good)
    # The long one stretches attention over what the short one's slot held before.
    requests = [make_request("short"), make_request("long", tuple(range(20)))]
    done = run(engine, requests)
    for request in requests:
        completion = done[request.key]
        close(completion.logprobs, plain_logprobs(good, request, completion.response_ids))


def test_engine_weights_not_loaded_yet_is_accepted():
    model = make_model()
    good = copy.deepcopy(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    engine = make_engine(model)
    swap(model, good)
    request = make_request()
    completion = run(engine, [request])["a"]
    close(completion.logprobs, plain_logprobs(good, request, completion.response_ids))


def test_step_prefill_failure_puts_requests_back_in_order():
    model = make_model()
    requests = make_requests(5)
    straight = run(make_engine(model), requests)
    engine = make_engine(model)
    engine.submit(requests[0])
    engine.step()
    for request in requests[1:]:
        engine.submit(request)
    prefill, engine._forward.prefill = engine._forward.prefill, lambda tokens, rows: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert (engine.num_running, engine.num_waiting) == (1, 4)
    engine._forward.prefill = prefill
    done = drain(engine)
    assert set(done) == set(range(5))
    for key, completion in straight.items():
        np.testing.assert_array_equal(completion.response_ids, done[key].response_ids)
        close(completion.logprobs, done[key].logprobs)
