"""The reference rollout and trainer learn, in a plain loop without a store."""

import numpy as np

from asyncflow_core.batch import Column, Key
from asyncflow_core.parts import PartContext
from asyncflow_core.reference.tabular_rollout import TabularRollout, TabularRolloutOptions
from asyncflow_core.reference.tabular_trainer import TabularTrainer, TabularTrainerOptions
from asyncflow_core.reference.weight_sync import MemoryWeightSync
from asyncflow_core.registry import NoOptions
from asyncflow_core.services.rollout import (
    GenerateRequest,
    SamplingParams,
    SwitchMode,
    completions_to_batch,
)
from asyncflow_core.services.trainer import LossSpec
from asyncflow_core.testing.aio import collect

VOCAB, SAMPLES = 6, 8
SAMPLING = SamplingParams(max_new_tokens=2)


def score(prompt, response):
    """The response counts on from the prompt's last token."""
    return float(np.mean([token == (prompt + i) % VOCAB for i, token in enumerate(response, 1)]))


async def test_rollout_and_trainer_learn_to_count_on(registry):
    ctx = PartContext(registry=registry)
    async with (
        TabularRollout(TabularRolloutOptions(vocab_size=VOCAB, positions=2), ctx) as rollout,
        TabularTrainer(
            TabularTrainerOptions(vocab_size=VOCAB, positions=2, optimizer="adam", lr=0.3), ctx
        ) as trainer,
        MemoryWeightSync(NoOptions(), ctx) as weights,
    ):
        rewards = []
        for version in range(25):
            requests = [
                GenerateRequest(
                    Key(0, version, prompt, sample),
                    np.array([prompt], np.int32),
                    SAMPLING,
                    seed=(version * VOCAB + prompt) * SAMPLES + sample,
                )
                for prompt in range(VOCAB)
                for sample in range(SAMPLES)
            ]
            completions = sorted(await collect(rollout.generate(requests)), key=lambda c: c.key)
            assert {v for c in completions for v in c.versions[:, 0].tolist()} == {version}
            scores = np.array([score(c.key.sequence, c.response_ids) for c in completions])
            groups = scores.reshape(VOCAB, SAMPLES)
            advantages = (groups - groups.mean(1, keepdims=True)).reshape(-1)
            batch = completions_to_batch(completions, SAMPLING).with_columns(
                {
                    "prompt_ids": Column.ragged([[c.key.sequence] for c in completions], np.int32),
                    "advantages": Column.ragged([[a] * 2 for a in advantages], np.float32),
                }
            )
            info = await trainer.forward_backward(batch, LossSpec("tabular_ppo_clip"), last=True)
            assert info.metrics["trainer/clip_share"][0] == 0.0
            await trainer.optim_step()
            published = await weights.publish(version + 1, 0, trainer.export_weights(version + 1))
            staged = await rollout.stage_weights(await weights.fetch(published))
            assert staged.checksum == published.manifest.checksum
            await rollout.commit_weights(version + 1, SwitchMode.DRAIN)
            await weights.retire(version)
            rewards.append(scores.mean())
    assert rewards[0] < 0.4
    assert np.mean(rewards[-3:]) > 0.9
