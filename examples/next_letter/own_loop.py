"""Your own loop: the services without the flow. Synchronous REINFORCE, one replica, one rank.

python examples/next_letter/own_loop.py
"""

from __future__ import annotations

import asyncio

import numpy as np

import asyncflow_core as af
from asyncflow_core.batch import Column, Key
from asyncflow_core.services.rollout import (
    GenerateRequest,
    SamplingParams,
    SwitchMode,
    completions_to_batch,
)

LETTERS, SAMPLES = 26, 8
SAMPLING = SamplingParams(max_new_tokens=1)


async def train(steps: int) -> list[float]:
    """The mean reward of each step: 1 where the response is the letter after the prompt's."""
    rewards = []
    async with (
        af.open("rollout", "tabular", vocab_size=LETTERS, positions=1) as rollout,
        af.open("trainer", "tabular", vocab_size=LETTERS, positions=1, lr=20.0) as trainer,
        af.open("weight_sync", "memory") as weights,
    ):
        for step in range(steps):
            requests = [
                GenerateRequest(
                    key=Key(0, step, letter, sample),
                    prompt_ids=np.array([letter], np.int32),
                    sampling=SAMPLING,
                    seed=(step * LETTERS + letter) * SAMPLES + sample,
                )
                for letter in range(LETTERS)
                for sample in range(SAMPLES)
            ]
            prompts = {request.key: request.prompt_ids for request in requests}
            completions = [completion async for completion in rollout.generate(requests)]
            reward = np.array(
                [c.response_ids[0] == (c.key.sequence + 1) % LETTERS for c in completions],
                np.float32,
            )
            rewards.append(float(reward.mean()))
            batch = completions_to_batch(completions, SAMPLING).with_columns(
                {
                    "prompt_ids": Column.ragged([prompts[c.key] for c in completions]),
                    "advantages": Column.ragged((reward - reward.mean())[:, None], np.float32),
                }
            )
            await trainer.forward_backward(batch, "tabular_ppo_clip", last=True)
            await trainer.optim_step()

            version = step + 1
            published = await weights.publish(version, 0, trainer.export_weights(version))
            staged = await rollout.stage_weights(await weights.fetch(published))
            assert staged.checksum == published.manifest.checksum
            await rollout.commit_weights(version, SwitchMode.DRAIN)
            await weights.retire(version)
    return rewards


def main() -> None:
    """Train and show every tenth step."""
    for step, reward in enumerate(asyncio.run(train(60))):
        if step % 10 == 9:
            print(step + 1, round(reward, 3))


if __name__ == "__main__":
    main()
