"""Makes the base model of this example: a tiny character model, briefly taught the task.

A Qwen3 configuration of 0.1 M parameters and a character tokenizer, warmed up by supervised steps
on training words that stop as soon as a fifth to a quarter of sampled answers are right. Seeded:
the same base every time. Held-out words are never seen; they are those of the run's own prompts.

    python examples/spell_backward/prepare.py [--force]
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from asyncflow_core import Registry
from asyncflow_core.config_source import ConfigSource
from asyncflow_core.parts import PartContext

HERE = Path(__file__).parent
BASE = HERE / "base"

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ("<pad>", "<bos>", "<eos>", ">")
SEED = 0
LR = 2e-3
BATCH = 128
STOP_AT = 0.20  # share of sampled answers that are right
CHECK_EVERY = 2
MAX_STEPS = 400
IGNORED = -100  # label of positions that are not answered


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, <bos> in front of every prompt."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *LETTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Two layers; rotary base 10, since words are short and positions are all that matters."""
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 10.0},
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3ForCausalLM(config)


def training_words() -> list[str]:
    """The words the run trains on, from the run's own configuration."""
    source = ConfigSource.from_file(HERE / "config.yaml")
    section = source.tree["prompts"]
    plugin = Registry().get("prompts", section["plugin"])
    tokenizer = Registry().get("tokenizer", "characters")
    characters = tokenizer.factory(
        tokenizer.parse_options({"alphabet": LETTERS + ">"}), PartContext()
    )
    prompts = plugin.factory(
        plugin.parse_options(section["options"]), PartContext(seed=SEED, tokenizer=characters)
    )
    return [str(record.fields["answer"])[::-1] for record in prompts.train(0)]


def encode(
    words: Sequence[str], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, L] of `<bos>word>drow<eos>` and the labels of the answer's positions [B, L]."""
    rows = tokenizer([f"{word}>" for word in words]).input_ids
    reversed_ids = tokenizer([word[::-1] for word in words], add_special_tokens=False).input_ids
    answers = [[*answer, tokenizer.eos_token_id] for answer in reversed_ids]
    longest = max(len(row) + len(answer) for row, answer in zip(rows, answers, strict=True))
    ids = torch.full((len(words), longest), tokenizer.pad_token_id)
    labels = torch.full((len(words), longest), IGNORED)
    for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        end = len(row) + len(answer)
        ids[number, :end] = torch.tensor(row + answer)
        labels[number, len(row) : end] = torch.tensor(answer)
    return ids, labels


@torch.inference_mode()
def sampled_accuracy(
    model: Qwen3ForCausalLM,
    ids: torch.Tensor,
    labels: torch.Tensor,
    generator: torch.Generator,
) -> float:
    """Share of answers sampled at temperature 1 that are right to the last token.

    An answer is right if each of its tokens is drawn right after the right ones before it, so one
    forward over the right answers is enough: draw at every position, count rows without a miss.
    """
    probabilities = model(input_ids=ids).logits[:, :-1].softmax(-1)
    drawn = torch.multinomial(probabilities.flatten(0, 1), 1, generator=generator)
    wanted = labels[:, 1:]
    right = (drawn.view_as(wanted) == wanted) | (wanted == IGNORED)
    return right.all(1).double().mean().item()


def warm_up(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, words: list[str]
) -> tuple[int, float]:
    """Supervised steps until the sampled accuracy is reached; how many, and the accuracy."""
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    ids, labels = encode(words, tokenizer)
    probe = ids[:1024], labels[:1024]
    for step in range(1, MAX_STEPS + 1):
        chosen = torch.randint(len(words), (BATCH,), generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, step / 20)
        loss = model(input_ids=ids[chosen], labels=labels[chosen]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % CHECK_EVERY == 0:
            accuracy = sampled_accuracy(model, *probe, generator)
            if accuracy >= STOP_AT:
                return step, accuracy
    raise SystemExit(f"the warm-up did not reach {STOP_AT} in {MAX_STEPS} steps")


def main() -> None:
    """Make the base unless it is there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--force", action="store_true", help="make it again")
    arguments = parser.parse_args()
    if BASE.exists() and not arguments.force:
        return
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    start = time.perf_counter()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    words = training_words()
    steps, accuracy = warm_up(model, tokenizer, words)
    unfinished = BASE.with_suffix(".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(BASE, ignore_errors=True)
    unfinished.rename(BASE)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"base model: {parameters:,} parameters, {steps} supervised steps on {len(words):,} words, "
        f"{accuracy:.2f} of sampled answers right, {time.perf_counter() - start:.1f} s"
    )


if __name__ == "__main__":
    main()
