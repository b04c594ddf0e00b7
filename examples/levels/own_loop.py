"""Level 3: the loop is yours; AsyncFlow gives you services, here with a loss of your own in numpy.

Both services run in this process. `asyncflow serve rollout tabular --bind ipc://... vocab_size=26`
runs one elsewhere, and `af.open("rollout", address=..., token=...)` opens it there.
"""

import asyncio
import types

import numpy as np

import asyncflow_core as af
from asyncflow_core.batch import Batch, Column, Key
from asyncflow_core.services.rollout import (
    Completion,
    GenerateRequest,
    SamplingParams,
    SwitchMode,
    completions_to_batch,
)
from asyncflow_core.services.trainer import LossCapabilities, LossOutput

LETTERS, SAMPLES, STEPS = 26, 16, 40
SAMPLING = SamplingParams(max_new_tokens=1)


def reinforce(logprobs: np.ndarray, columns: dict, config: object) -> LossOutput:
    """The plainest policy gradient: minus advantage times log-prob."""
    weights = columns["loss_mask"] * columns["advantages"]
    loss = -float((weights * logprobs).sum())
    return LossOutput(sum=loss, weight=float(len(logprobs)), grad=-weights)


@af.hookimpl
def asyncflow_register(registrar: af.Registrar) -> None:
    able = LossCapabilities(arrays="numpy", reads=("advantages",))
    registrar.add("loss", "reinforce", lambda *_: reinforce, api_version=1, capabilities=able)


async def answers(rollout: af.Rollout, step: int) -> list[Completion]:
    requests = [
        GenerateRequest(
            Key(0, step, letter, sample),
            np.array([letter], np.int32),
            SAMPLING,
            seed=(step * LETTERS + letter) * SAMPLES + sample,
        )
        for letter in range(LETTERS)
        for sample in range(SAMPLES)
    ]
    return sorted([c async for c in rollout.generate(requests)], key=lambda c: c.key)


def judged(completions: list[Completion]) -> tuple[float, Batch]:
    """The mean reward, and the batch to train on."""
    right = [(c.key.sequence + 1) % LETTERS == c.response_ids[0] for c in completions]
    rewards = np.array(right, np.float32).reshape(LETTERS, SAMPLES)
    advantages = (rewards - rewards.mean(1, keepdims=True)).reshape(-1, 1)
    columns = {
        "prompt_ids": Column.ragged([[c.key.sequence] for c in completions], np.int32),
        "advantages": Column.ragged(advantages, np.float32),
    }
    return float(rewards.mean()), completions_to_batch(completions, SAMPLING).with_columns(columns)


async def main() -> None:
    registry = af.Registry()
    mine = types.ModuleType("mine")
    mine.asyncflow_register = asyncflow_register
    registry.add(mine)
    async with (
        af.open("rollout", "tabular", vocab_size=LETTERS, positions=1) as rollout,
        af.open(
            "trainer", "tabular", vocab_size=LETTERS, positions=1, lr=400.0, registry=registry
        ) as trainer,
        af.open("weight_sync", "memory") as weights,
    ):
        before = after = 0.0
        for step in range(STEPS):
            after, batch = judged(await answers(rollout, step))
            before = before or after
            await trainer.forward_backward(batch, "reinforce", last=True)
            await trainer.optim_step()
            published = await weights.publish(step + 1, 0, trainer.export_weights(step + 1))
            await rollout.stage_weights(await weights.fetch(published))
            await rollout.commit_weights(step + 1, SwitchMode.DRAIN)
            await weights.retire(step)
        print(f"reward {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    asyncio.run(main())
