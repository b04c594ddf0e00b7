"""One rank of a tabular trainer in a process of its own: RANK WORLD_SIZE RUN_DIR."""

import asyncio
import sys
from pathlib import Path

import numpy as np
from conftest import make_batch

from asyncflow_core.parts import PartContext
from asyncflow_core.reference import plugin
from asyncflow_core.reference.tabular_trainer import TabularTrainer, TabularTrainerOptions
from asyncflow_core.registry import Registry
from asyncflow_core.services.trainer import LossSpec


async def main(rank: int, world_size: int, run_dir: Path) -> None:
    registry = Registry([])
    registry.add(plugin)
    options = TabularTrainerOptions(vocab_size=7, optimizer="adam", lr=0.1, timeout_s=20.0)
    ctx = PartContext(
        name=f"trainer-{rank}", rank=rank, world_size=world_size, run_dir=run_dir, registry=registry
    )
    async with TabularTrainer(options, ctx) as trainer:
        for step in range(3):
            share = make_batch(seed=step).take(range(rank, 6, world_size))
            await trainer.forward_backward(share, LossSpec("tabular_ppo_clip"), last=True)
            await trainer.optim_step()
        await trainer.save(str(run_dir / "state"))
        np.save(run_dir / f"logits-{rank}.npy", trainer._model.logits)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
