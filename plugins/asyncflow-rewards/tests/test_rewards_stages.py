import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column
from asyncflow_core.errors import ConfigError
from asyncflow_core.parts import PartContext, Tokenizer
from asyncflow_rewards.options import ExactMatchOptions, ReasoningGymRewardOptions
from asyncflow_rewards.stages import (
    exact_match_contract,
    exact_match_stage,
    reasoning_gym_contract,
    reasoning_gym_faults,
    reasoning_gym_stage,
)


class Bytes(Tokenizer):
    eos_token_ids = (0,)
    vocab_size = 256

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(int(i) for i in ids if i).decode()


CTX = PartContext(tokenizer=Bytes())


def rows(responses, **columns):
    ids = Column.ragged([list(r.encode()) for r in responses], np.int32)
    objects = {name: Column.objects(values) for name, values in columns.items()}
    return Batch({"response_ids": ids, **objects})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 0, 0]),
        ({"strip": False}, [1, 0, 0, 0]),
        ({"case": False}, [1, 1, 1, 0]),
        ({"require_stop": True}, [1, 0, 0, 0]),
    ],
)
def test_exact_match_options(options, expected):
    batch = rows(
        ["abc", " abc\n", "ABC", "ab"],
        answer=["abc"] * 4,
        finish_reason=["stop", "length", "stop", "stop"],
    )
    out = exact_match_stage(ExactMatchOptions(**options), CTX)(batch)
    assert out["reward"].tolist() == expected
    assert out["reward"].dtype == np.float32
    assert list(out["reward_error"]) == [None] * 4


def test_exact_match_other_field_and_answer_that_is_no_text():
    out = exact_match_stage(ExactMatchOptions(answer="gold"), CTX)(rows(["1", "1"], gold=["1", 1]))
    assert out["reward"].tolist() == [1, 0]
    assert "int" in list(out["reward_error"])[1]


def test_contracts_follow_the_options_on_both_partitions():
    plain = exact_match_contract(ExactMatchOptions(answer="gold"))
    assert plain.reads == ("response_ids", "gold")
    assert plain.writes == ("reward", "reward_error")
    assert plain.partitions == ("train", "eval")
    stop = reasoning_gym_contract(ReasoningGymRewardOptions(require_stop=True))
    assert stop.reads == ("response_ids", "entry", "finish_reason")


def entry(dataset, answer, **metadata):
    return {"question": "", "answer": answer, "metadata": {"source_dataset": dataset, **metadata}}


def test_reasoning_gym_graded_and_exact_differ_on_nearly_right():
    words = [entry("spell_backward", "olleh")] * 3
    batch = rows(["olleh", "olleX", "ollehh"], entry=words)
    graded = reasoning_gym_stage(ReasoningGymRewardOptions(), CTX)(batch)
    assert graded["reward"].tolist() == pytest.approx([1, 0.8, 0.8])
    exact = reasoning_gym_stage(ReasoningGymRewardOptions(exact=True), CTX)(batch)
    assert exact["reward"].tolist() == [1, 0, 0]


@pytest.mark.parametrize("length", range(1, 13))
def test_reasoning_gym_exact_one_letter_too_many_is_wrong(length):
    # Sums of 1 / length can come out just below 1 and so escape the verifier's own deduction.
    word = "abcdefghijklm"[:length]
    batch = rows([word + "x"], entry=[entry("spell_backward", word)])
    out = reasoning_gym_stage(ReasoningGymRewardOptions(exact=True), CTX)(batch)
    assert out["reward"].tolist() == [0]


def test_reasoning_gym_verifier_that_raises_scores_zero_and_is_shown():
    batch = rows(["2 \u00d7 3", "spam"], entry=[entry("prime_factorization", "2 \u00d7 3")] * 2)
    out = reasoning_gym_stage(ReasoningGymRewardOptions(), CTX)(batch)
    assert out["reward"].tolist() == [1, 0]
    assert next(iter(out["reward_error"])) is None
    assert "ValueError" in list(out["reward_error"])[1]


def test_reasoning_gym_answer_tag_takes_the_last():
    options = ReasoningGymRewardOptions(answer_tag="answer", dataset="spell_backward")
    replies = ["<answer>no</answer> <answer> olleh</answer>.", "olleh", "<answer>olleh"]
    batch = rows(replies, entry=[{"answer": "olleh", "metadata": {}}] * 3)
    out = reasoning_gym_stage(options, CTX)(batch)
    assert out["reward"].tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("I write it in <answer> at the end. <answer>olleh</answer>", 1),
        ("<answer>no</answer> <answer>olleh</answer>", 1),
        ("<answer>olleh</answer> and <answer> again", 1),
        ("<answer></answer>", 0),
        ("olleh</answer>", 0),
        ("</answer><answer>olleh", 0),
    ],
)
def test_reasoning_gym_answer_tag_begins_at_the_opening_tag_nearest_before_its_end(reply, expected):
    options = ReasoningGymRewardOptions(answer_tag="answer", dataset="spell_backward", exact=True)
    batch = rows([reply], entry=[{"answer": "olleh", "metadata": {}}])
    out = reasoning_gym_stage(options, CTX)(batch)
    assert out["reward"].tolist() == [expected]
    assert list(out["reward_error"]) == [None]


def test_reasoning_gym_require_stop_cut_response_scores_zero():
    options = ReasoningGymRewardOptions(require_stop=True)
    words = [entry("spell_backward", "ba")] * 2
    batch = rows(["ba", "ba"], entry=words, finish_reason=["length", "stop"])
    assert reasoning_gym_stage(options, CTX)(batch)["reward"].tolist() == [0, 1]


def test_reasoning_gym_faults_name_them():
    assert reasoning_gym_faults(ReasoningGymRewardOptions()) == []
    (fault,) = reasoning_gym_faults(ReasoningGymRewardOptions(dataset="chain_sums"))
    assert "did you mean 'chain_sum'" in fault
    (fault,) = reasoning_gym_faults(ReasoningGymRewardOptions(dataset_options={"a": 1}))
    assert "need a dataset" in fault


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (exact_match_stage, ExactMatchOptions()),
        (reasoning_gym_stage, ReasoningGymRewardOptions()),
    ],
)
def test_stage_without_tokenizer_refused(stage, options):
    with pytest.raises(ConfigError, match="tokenizer"):
        stage(options, PartContext())
