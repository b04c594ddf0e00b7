"""One rank of test_hzp_conformance: a trainer that is opened anew for each test."""

import asyncio
import json
import os
import sys

from hzp_helpers import make_trainer
from torch import distributed

from asyncflow_core.parts import PartContext
from asyncflow_core.testing.ranks import serve_rank


async def main(model_dir, address, options):
    distributed.init_process_group("gloo")  # one for all tests: the trainer uses what is there
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    context = PartContext(name=f"trainer-{rank}", rank=rank, world_size=size)
    await serve_rank(make_trainer(model_dir, context=context, **json.loads(options)), address)


asyncio.run(main(*sys.argv[1:]))
os._exit(0)  # the group's tear-down would wait for the other rank
