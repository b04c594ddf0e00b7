"""One rank of test_hzp_ranks: trains its share of each batch, prints what it ended with."""

import asyncio
import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np
from hzp_helpers import POLICY, make_batch, make_trainer, weights_of

from asyncflow_core.parts import PartContext


async def main(model_dir, out, options):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    context = PartContext(name="trainer", rank=rank, world_size=size)
    async with make_trainer(model_dir, context=context, **json.loads(options)) as trainer:
        for step in range(2):
            batch = make_batch(9, step)
            # The second micro-batch is empty: ranks must stay in step.
            shares = np.array_split(np.arange(9), size)[rank]
            for rows in (shares, shares[:0]):
                last = not len(rows)
                await trainer.forward_backward(batch.take(rows), POLICY, last=last)
            update = await trainer.optim_step()
        await trainer.save(f"{out}/saved")
        await trainer.save_model(f"{out}/model")
        # Updates from a checkpoint of one's own are those without it.
        await trainer.forward_backward(make_batch(4, 8 + rank), POLICY, last=True)
        await trainer.zero_grad()
        await trainer.load(f"{out}/saved")
        exported = await weights_of(trainer)
        state = b"".join(
            tensor.numpy().tobytes() for tensor in trainer._engine._shards.state().values()
        )
        logprobs = await trainer.forward(make_batch(3, 9))
    record = {
        "norm": update.grad_norm,
        "weight": update.weight,
        "exported": sorted(exported),
        "state": hashlib.sha256(state).hexdigest(),
        "logprobs": [row.tolist() for row in logprobs["logprobs"]],
    }
    return rank, record


number, found = asyncio.run(main(*sys.argv[1:]))
Path(f"{sys.argv[2]}/{number}.json").write_text(json.dumps(found))
