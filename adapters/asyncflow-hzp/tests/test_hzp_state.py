"""Weights out, checkpoints, model directories."""

import numpy as np
import pytest
import torch
from hzp_helpers import POLICY, make_batch, make_trainer, plain_logprobs, tiny_qwen3, weights_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from asyncflow_core.errors import DataError, ServiceError
from asyncflow_core.services.trainer import SupportsModelExport


async def train(trainer, steps):
    for step in steps:
        await trainer.forward_backward(make_batch(seed=step), POLICY, last=True)
        await trainer.optim_step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_export_gives_every_tensor_once_in_small_buckets(model_dir, dtype):
    async with make_trainer(model_dir, dtype=dtype, bucket_bytes=20_000) as trainer:
        await train(trainer, [0])
        buckets, found = 0, {}
        async for bucket in trainer.export_weights(1):
            buckets += 1
            for spec in bucket.specs:
                assert spec.offset % 64 == 0
                assert spec.name not in found
                found[spec.name] = (spec, bucket.tensor_bytes(spec).tobytes())
            assert bucket.data.nbytes <= 64 * 192 * 4
        assert buckets > 3
        model = trainer._engine._model
        assert set(found) == {name for name, _ in model.named_parameters()}
        for name, (spec, data) in found.items():
            assert spec.dtype == {"float32": "F32", "bfloat16": "BF16"}[dtype]
            expected = model.get_parameter(name).detach()
            assert data == expected.contiguous().view(torch.uint8).numpy().tobytes()
        assert found["model.embed_tokens.weight"][0].aliases == ("lm_head.weight",)


async def test_export_across_an_update_is_refused(model_dir):
    async with make_trainer(model_dir, bucket_bytes=1000) as trainer:
        export = trainer.export_weights(0)
        await anext(export)
        await train(trainer, [0])
        with pytest.raises(ServiceError, match="while they were exported"):
            async for _ in export:
                pass


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_save_and_load_continue_bit_equal(model_dir, tmp_path, dtype):
    options = {"dtype": dtype, "warmup_updates": 3, "schedule": "linear", "total_updates": 9}
    async with make_trainer(model_dir, **options) as straight:
        await train(straight, [0, 1])
        await straight.save(str(tmp_path / "two"))
        await train(straight, [2, 3])
        expected = await weights_of(straight)
    async with make_trainer(model_dir, **options) as resumed:
        await train(resumed, [7])
        await resumed.forward_backward(make_batch(seed=9), POLICY, last=True)
        await resumed.load(str(tmp_path / "two"))
        assert (await resumed.stats()).updates == 2
        await train(resumed, [2, 3])
        assert await weights_of(resumed) == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["two"]


async def test_save_before_the_first_update_can_be_loaded_by_a_trained_one(model_dir, tmp_path):
    async with make_trainer(model_dir) as fresh, make_trainer(model_dir) as trained:
        await fresh.save(str(tmp_path / "zero"))
        await train(trained, [5, 6])
        await trained.load(str(tmp_path / "zero"))
        await train(fresh, [0])
        await train(trained, [0])
        assert await weights_of(fresh) == await weights_of(trained)


async def test_save_between_backward_and_update_is_refused(model_dir, tmp_path):
    async with make_trainer(model_dir) as trainer:
        await trainer.forward_backward(make_batch(), POLICY, last=True)
        with pytest.raises(ServiceError, match="half an update"):
            await trainer.save(str(tmp_path / "half"))
    assert not list(tmp_path.iterdir())


async def test_save_over_something_is_refused(model_dir, tmp_path):
    async with make_trainer(model_dir) as trainer:
        await trainer.save(str(tmp_path / "a"))
        with pytest.raises(ServiceError, match="exists already"):
            await trainer.save(str(tmp_path / "a"))


async def test_load_of_a_bad_checkpoint_names_it_and_changes_nothing(model_dir, tmp_path):
    async with make_trainer(model_dir) as trainer:
        await train(trainer, [0])
        before = await weights_of(trainer)
        with pytest.raises(DataError, match="no checkpoint"):
            await trainer.load(str(tmp_path / "nothing"))
        await trainer.save(str(tmp_path / "cut"))
        file = next((tmp_path / "cut" / "optimizer").glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-10])
        with pytest.raises(DataError, match="cut is no checkpoint"):
            await trainer.load(str(tmp_path / "cut"))
        other_dir = tmp_path / "other"
        tiny_qwen3(hidden_size=32).save_pretrained(other_dir)
        async with make_trainer(other_dir) as other:
            await other.save(str(tmp_path / "narrow"))
        with pytest.raises(DataError, match=r"differ|shape"):
            await trainer.load(str(tmp_path / "narrow"))
        assert await weights_of(trainer) == before


@pytest.mark.parametrize("tied", [True, False])
async def test_save_model_writes_what_transformers_loads(tmp_path, tied):
    source = tmp_path / "source"
    tiny_qwen3(tie_word_embeddings=tied).save_pretrained(source)
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(source)
    batch = make_batch()
    async with make_trainer(source) as trainer:
        assert isinstance(trainer, SupportsModelExport)
        await train(trainer, [0])
        await trainer.save_model(str(tmp_path / "out"))
        found = await trainer.forward(batch)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    for row in range(batch.rows):
        expected = plain_logprobs(model, batch, row)
        np.testing.assert_allclose(found["logprobs"][row], expected, atol=2e-6)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("b a").input_ids == [2, 1]
