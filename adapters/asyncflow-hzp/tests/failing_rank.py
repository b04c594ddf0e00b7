"""One rank of two, of which rank 1 fails or dies in the middle of a call; prints what it raised."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from hzp_helpers import POLICY, make_batch, make_trainer

from asyncflow_core.errors import AsyncFlowError
from asyncflow_core.parts import PartContext


def fail(*_):
    raise RuntimeError("out of memory")


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


async def main(model_dir, out, how):
    rank = int(os.environ["RANK"])
    context = PartContext(name="trainer", rank=rank, world_size=2)
    options = {"sharding": [2, 2, 2], "collective_timeout_s": 3600.0}
    async with make_trainer(model_dir, context=context, **options) as trainer:
        await trainer.forward_backward(make_batch(6, rank), POLICY, last=True)
        await trainer.optim_step()
        if rank == 1:
            layer = trainer._engine._model.model.layers[1]
            layer.register_forward_pre_hook({"fail": fail, "die": die}[how])
        errors = []
        for call in (trainer.forward(make_batch(6, rank)), trainer.optim_step()):
            try:
                await call
            except AsyncFlowError as error:
                errors.append(str(error))
    return rank, errors


number, raised = asyncio.run(main(*sys.argv[1:]))
Path(f"{sys.argv[2]}/{number}.json").write_text(json.dumps(raised))
