import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_core.errors import ConfigError, DataError
from asyncflow_core.parts import PartContext
from asyncflow_core.reference.tabular import (
    TabularModel,
    TabularOptions,
    draw_tokens,
    log_softmax,
    truncate,
    uniform,
)
from asyncflow_core.reference.tokenizer import CharactersOptions, CharactersTokenizer
from asyncflow_core.services.rollout import SamplingParams


def model(**options):
    return TabularModel(TabularOptions(**{"vocab_size": 5, **options}), PartContext())


@pytest.mark.parametrize("previous", [False, True])
def test_contexts_of_response_equal_context_token_by_token(previous):
    table = model(previous_token=previous, positions=3)
    prompt, response = np.array([2, 4], np.int32), np.array([1, 0, 3, 3, 2], np.int32)
    before = [4, 1, 0, 3, 3]
    expected = [table.context(4, i, before[i]) for i in range(5)]
    assert table.contexts(prompt, response).tolist() == expected
    assert len(set(expected[:3])) == 3
    assert (expected[3] == expected[4]) is True
    assert max(expected) < len(table.rows)


def test_contexts_no_response_none():
    assert model(previous_token=True).contexts(np.array([1]), np.array([], np.int32)).tolist() == []


def test_first_weights_equal_options_equal_and_seed_matters():
    first, same = model(init_scale=1.0).logits, model(init_scale=1.0).logits
    assert first.tobytes() == same.tobytes()
    assert first.tobytes() != model(init_scale=1.0, init_seed=1).logits.tobytes()


def test_vocabulary_without_option_is_the_tokenizers():
    tokenizer = CharactersTokenizer(CharactersOptions(alphabet="abc"), PartContext())
    assert TabularModel(TabularOptions(), PartContext(tokenizer=tokenizer)).vocab_size == 4
    with pytest.raises(ConfigError, match="vocab_size"):
        TabularModel(TabularOptions(), PartContext())


def test_check_ids_outside_vocabulary_refused():
    with pytest.raises(DataError, match="0 to 4"):
        model().check_ids(np.array([0, 5], np.int32), "the prompt")


def test_log_softmax_equals_naive_computation():
    logits = np.array([[0.3, -2.0, 700.0, 699.0]])
    naive = [x - 700 - math.log(sum(math.exp(y - 700) for y in logits[0])) for x in logits[0]]
    np.testing.assert_allclose(log_softmax(logits)[0], naive, rtol=1e-12)


def test_truncate_keeps_what_is_asked_for():
    probs = np.array([0.1, 0.4, 0.2, 0.25, 0.05])

    def kept(**sampling):
        return np.flatnonzero(truncate(probs, SamplingParams(**sampling))).tolist()

    assert kept(top_k=2) == [1, 3]
    assert kept(top_p=0.4) == [1]
    assert kept(top_p=0.41) == [1, 3]
    assert kept(min_p=0.5) == [1, 2, 3]
    assert kept(top_p=0.0) == [1]


@given(
    st.lists(st.floats(-5, 5), min_size=2, max_size=6),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 3),
    st.sampled_from([1.0, 0.7, 0.3]),
)
@settings(deadline=None, max_examples=200)
def test_draw_never_leaves_what_truncation_kept(logits, number, top_k, top_p):
    sampling = SamplingParams(top_k=top_k, top_p=top_p)
    tokens, logprobs = draw_tokens(np.array([logits]), [sampling], [number])
    kept = truncate(np.exp(log_softmax(np.array(logits))), sampling)
    assert kept[tokens[0]] > 0
    assert logprobs[0] == np.float32(log_softmax(np.array(logits))[tokens[0]])


def test_draw_frequencies_are_the_probabilities():
    logits, count = np.array([0.0, 1.0, 2.0, -1.0]), 20_000
    samplings = [SamplingParams(temperature=2.0)] * count
    numbers = [uniform(seed, seed % 7) for seed in range(count)]
    tokens, _ = draw_tokens(np.tile(logits, (count, 1)), samplings, numbers)
    share = np.bincount(tokens, minlength=4) / count
    # Six standard deviations of a share near 1/2.
    np.testing.assert_allclose(share, np.exp(log_softmax(logits / 2)), atol=6 * 0.5 / count**0.5)


@given(st.integers(-(2**70), 2**70), st.integers(0, 1 << 20))
@settings(deadline=None, max_examples=100)
def test_uniform_any_seed_in_unit_interval_and_stable(seed, index):
    assert 0.0 <= uniform(seed, index) < 1.0
    assert uniform(seed, index) == uniform(seed, index)


def test_uniform_is_spread_over_seeds_and_indices():
    numbers = [uniform(seed, index) for seed in range(200) for index in range(50)]
    assert len(set(numbers)) == 10_000
    assert abs(np.mean(numbers) - 0.5) < 0.02
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05
