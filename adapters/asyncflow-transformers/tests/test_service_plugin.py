"""Registration, early checks and the tokenizer."""

import subprocess
import sys

import numpy as np
import pytest
from rollout_helpers import make_requests
from tokenizers import Tokenizer as Words
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, PreTrainedTokenizerFast

from asyncflow_core.errors import ConfigError, DataError
from asyncflow_core.parts import PartContext, encode_prompt
from asyncflow_core.registry import PluginEntry, Registry

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def plugin(kind, name):
    module = "asyncflow_transformers.plugin"
    entry = PluginEntry(kind, name, module, "asyncflow-transformers", "0.1.0")
    return Registry([entry]).get(kind, name)


def save_tokenizer(path, template=None):
    names = ["<unk>", "<s>", "</s>", "a", "b", "<user>", "<assistant>"]
    words = Words(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = ["<user>", "<assistant>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special,
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


def load(path):
    found = plugin("tokenizer", "huggingface")
    return found.factory(found.options(model=str(path)), PartContext())


def test_tokenizer_adds_what_the_model_wants_and_drops_it_again(tmp_path):
    tokenizer = load(save_tokenizer(tmp_path))
    assert tokenizer.encode("a b") == [1, 3, 4]
    assert tokenizer.decode(np.array([3, 4, 2], np.int32)) == "a b"
    assert tokenizer.decode_all([3, 4, 2]) == "a b </s>"
    assert tokenizer.vocab_size == 7
    assert tokenizer.eos_token_ids == (2,)
    assert not tokenizer.has_chat_template
    with pytest.raises(NotImplementedError):
        tokenizer.encode_chat([{"role": "user", "content": "a"}])


def test_tokenizer_ends_are_those_of_the_generation_config_too(tmp_path):
    save_tokenizer(tmp_path)
    GenerationConfig(eos_token_id=[4, 2]).save_pretrained(tmp_path)
    assert load(tmp_path).eos_token_ids == (4, 2)


def test_chat_template_is_used_where_there_is_one(tmp_path):
    tokenizer = load(save_tokenizer(tmp_path, TEMPLATE))
    assert tokenizer.has_chat_template
    assert encode_prompt(tokenizer, "a b") == [5, 3, 4, 6]
    assert encode_prompt(tokenizer, "a b", chat=False) == [1, 3, 4]


def test_tokenizer_without_files_is_refused(tmp_path):
    found = plugin("tokenizer", "huggingface")
    options = found.options(model=str(tmp_path))
    assert "tokenizer.json" in next(iter(found.check(options)))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        found.factory(options, PartContext())
    missing = found.options(model=str(tmp_path / "nowhere"))
    assert "nowhere" in next(iter(found.check(missing)))


def test_rollout_check_names_the_path(tmp_path, model_dir):
    found = plugin("rollout", "transformers")

    def faults(path):
        return list(found.check(found.options(model=str(path))))

    assert faults(model_dir) == []
    assert "nowhere" in faults(tmp_path / "nowhere")[0]
    assert "config.json" in faults(tmp_path)[0]
    service = found.factory(found.options(model=str(model_dir)), PartContext())
    assert type(service).__name__ == "TransformersRollout"


@pytest.mark.parametrize("options", [{}, {"max_length": 17}])
async def test_rollout_takes_as_many_tokens_as_it_declares(model_dir, options):
    found = plugin("rollout", "transformers")
    chosen = found.options(model=str(model_dir), **options)
    most = found.capabilities_for(chosen).max_tokens
    async with found.factory(chosen, PartContext(name="r")) as service:
        (fits,) = make_requests(1, prompt=[1] * (most - 1), max_new_tokens=1)
        assert len([done async for done in service.generate([fits])]) == 1
        (longer,) = make_requests(1, prompt=[1] * most, max_new_tokens=1)
        with pytest.raises(DataError, match=f"at most the engine's max_length {most}"):
            await anext(service.generate([longer]))


def test_rollout_declares_a_length_whatever_the_model_says(tmp_path):
    found = plugin("rollout", "transformers")

    def declared(text, **options):
        (tmp_path / "config.json").write_text(text)
        chosen = found.options(model=str(tmp_path), **options)
        return found.capabilities_for(chosen).max_tokens

    assert declared('{"max_position_embeddings": 99}') == 99
    assert declared('{"text_config": {"max_position_embeddings": 99}}') == 99
    assert declared('{"max_position_embeddings": 1000000}') == 4096
    assert declared("{}") == declared("[1") == declared("[]") == 4096
    larger = {"max_position_embeddings": 128}
    assert declared('{"max_position_embeddings": 99}', engine_args=larger) == 128


def test_plugin_module_imports_no_torch():
    code = "import sys, asyncflow_transformers.plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
