"""One rank of two that are asked for what only one of them can do; prints what each call raised."""

import asyncio
import json
import os
import sys
from pathlib import Path

from hzp_helpers import POLICY, make_batch, make_trainer

from asyncflow_core.errors import AsyncFlowError
from asyncflow_core.parts import PartContext
from asyncflow_core.services.trainer import LossSpec


async def main(model_dir, out):
    rank = int(os.environ["RANK"])
    context = PartContext(name="trainer", rank=rank, world_size=2)
    batch, errors = make_batch(6), []

    async def tried(call):
        try:
            await call
        except AsyncFlowError as error:
            errors.append(str(error))

    # Parameters are whole, so that ranks meet in updates and checkpoints only.
    options = {"sharding": [1, 2, 2], "collective_timeout_s": 60.0}
    async with make_trainer(model_dir, context=context, **options) as trainer:
        loss = LossSpec("detached") if rank else POLICY
        await tried(trainer.forward_backward(batch, loss, last=True))
        await tried(trainer.optim_step())
        await trainer.zero_grad()
        rows = batch.take([]) if rank else batch
        await trainer.forward_backward(rows, POLICY, last=False)
        await tried(trainer.save(f"{out}/saved"))
        update = await trainer.optim_step()
        await trainer.save(f"{out}/saved")
    return rank, {"errors": errors, "weight": update.weight, "norm": update.grad_norm}


number, found = asyncio.run(main(*sys.argv[1:]))
Path(f"{sys.argv[2]}/{number}.json").write_text(json.dumps(found))
