import itertools
import json

import pytest

from asyncflow_core.errors import ConfigError, DataError
from asyncflow_core.parts import PartContext
from asyncflow_core.reference.prompts import (
    JsonlPrompts,
    JsonlPromptsOptions,
    check_jsonl,
    jsonl_contract,
)
from asyncflow_core.reference.tokenizer import CharactersOptions, CharactersTokenizer

TOKENIZER = CharactersTokenizer(CharactersOptions(), PartContext())


@pytest.fixture
def write(tmp_path):
    def make(*lines, name="train.jsonl"):
        path = tmp_path / name
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        path.write_text("\n".join(texts), "utf-8")
        return path

    return make


def rows(count):
    return [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(count)]


def make_options(path, **options):
    if "evaluation_path" in options:
        options["evaluation_path"] = str(options["evaluation_path"])
    return JsonlPromptsOptions(path=str(path), **options)


def build(path, *, seed=0, tokenizer=TOKENIZER, **options):
    ctx = PartContext(seed=seed, tokenizer=tokenizer)
    return JsonlPrompts(make_options(path, **options), ctx)


def faults(path, **options):
    return check_jsonl(make_options(path, **options))


def test_train_in_file_order_with_columns(write):
    prompts = build(write(*rows(3), "", "  "), shuffle=False)
    records = list(prompts.train(0))
    assert prompts.fields == ("answer",)
    assert jsonl_contract(prompts._options).writes == ("answer",)
    assert [TOKENIZER.decode(r.prompt_ids) for r in records] == ["0+0=", "1+1=", "2+2="]
    assert [r.fields for r in records] == [{"answer": 0}, {"answer": 2}, {"answer": 4}]
    assert list(prompts.evaluation()) == []


def test_train_shuffled_by_seed_and_epoch(write):
    path = write(*rows(30))

    def order(seed, epoch):
        return [record.fields["answer"] for record in build(path, seed=seed).train(epoch)]

    assert order(1, 2) == order(1, 2)
    assert order(-1, 0) == order(-1, 0)
    orders = [order(seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    assert all(sorted(o) == [2 * i for i in range(30)] for o in orders)


def test_evaluation_share_disjoint_stable_and_about_as_large(write):
    lines = rows(400)
    prompts = build(write(*lines, *lines), evaluation_share=0.25, shuffle=False)
    train = [r.fields["answer"] for r in prompts.train(0)]
    held_out = [r.fields["answer"] for r in prompts.evaluation()]
    assert set(train).isdisjoint(held_out)
    assert len(train) + len(held_out) == 800
    assert 130 < len(held_out) < 270
    reordered = build(write(*reversed(lines), name="other.jsonl"), evaluation_share=0.25)
    assert {r.fields["answer"] for r in reordered.evaluation()} == set(held_out)


def test_evaluation_path_is_read(write):
    path, other = write(*rows(3)), write({"prompt": "9", "answer": 9}, name="eval.jsonl")
    prompts = build(path, evaluation_path=other)
    assert [r.fields for r in prompts.evaluation()] == [{"answer": 9}]


def test_messages_and_chat_need_a_template(write):
    chats = []

    class Chat(CharactersTokenizer):
        has_chat_template = True

        def encode_chat(self, messages):
            chats.append([dict(m) for m in messages])
            return [1]

    message = {"role": "user", "content": "hi"}
    tokenizer = Chat(CharactersOptions(), PartContext())
    path = write({"prompt": [message]}, {"prompt": "hi"})
    assert [r.prompt_ids for r in build(path, tokenizer=tokenizer).train(0)] == [[1], [1]]
    assert chats == [[message], [message]]
    plain = build(path, tokenizer=tokenizer, chat=False, shuffle=False)
    assert list(plain.train(0))[1].prompt_ids == TOKENIZER.encode("hi")
    with pytest.raises(DataError, match=r"train.jsonl:1: .*no chat template"):
        list(build(path, shuffle=False).train(0))


def test_every_fault_found_with_file_and_line(write):
    path = write(
        {"prompt": "fine", "answer": 1},
        '{"prompt": "cut"',
        "[1]",
        {"answer": 1},
        {"prompt": "", "answer": 1},
        {"prompt": 5, "answer": 1},
        {"prompt": [], "answer": 1},
        {"prompt": [{"role": "user"}], "answer": 1},
        '{"prompt": "a", "answer": 1, "answer": 2}',
        {"prompt": "a", "answer": 1, "reward": 0},
        '{"prompt": "a", "answer": NaN}',
        {"prompt": "a"},
        '{"prompt": ' + "[" * 100_000,
    )
    expected = {
        2: "malformed JSON at column",
        3: "an object is expected, got list",
        4: "no field 'prompt' (there are: ['answer'])",
        5: "the field 'prompt' is empty",
        6: "is int, not text or messages",
        7: "has no messages",
        8: "message 1 of 'prompt' needs",
        9: "duplicate field 'answer'",
        10: "'reward' is a column of AsyncFlow's own",
        11: "NaN is not JSON",
        12: f"the fields are [], at {path}:1 they are ['answer']",
        13: "malformed JSON",
    }
    found = {int(f.removeprefix(f"{path}:").split(":")[0]): f for f in faults(path)}
    assert found.keys() == expected.keys()
    for number, text in expected.items():
        assert text in found[number]
    with pytest.raises(ConfigError) as raised:
        build(path)
    assert len(raised.value.faults) == len(expected)


def test_faults_of_whole_files(write, tmp_path):
    assert faults(write("", name="empty.jsonl")) == [
        f"{tmp_path / 'empty.jsonl'}: the file has no prompts"
    ]
    (missing,) = faults(tmp_path / "missing.jsonl")
    assert missing.endswith("missing.jsonl: No such file or directory")
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    (fault,) = faults(latin)
    assert fault.startswith(f"{latin}:2: not UTF-8")


def test_held_out_prompt_also_trained_names_both_lines(write):
    path = write(*rows(3))
    other = write(rows(2)[1], {"prompt": "9", "other": 1}, name="eval.jsonl")
    found = faults(path, evaluation_path=other)
    assert f"{other}:1: the held-out prompt is also at {path}:2" in found
    assert any(f.startswith(f"{other}:2: the fields are ['other']") for f in found)


def test_one_prompt_held_out_leaves_none_to_train(write):
    path = write({"prompt": "a"})
    assert any("holds out every prompt" in f for f in faults(path, evaluation_share=0.999999))
    with pytest.raises(ValueError, match="not both"):
        make_options(path, evaluation_path=path, evaluation_share=0.5)


def test_unknown_character_names_the_line(write):
    with pytest.raises(DataError, match=r"train\.jsonl:1: the character '\xe9'"):
        list(build(write({"prompt": "\u00e9"})).train(0))
    with pytest.raises(ConfigError, match="tokenizer"):
        build(write({"prompt": "a"}), tokenizer=None)
