"""A rollout, a trainer and a stage as on bad days; found by the .dist-info beside this file."""

import asyncio
import itertools
import os
import subprocess
import threading

from asyncflow_core.errors import DataError, EngineError
from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import StageContract
from asyncflow_core.reference.tabular_rollout import (
    TABULAR_ROLLOUT,
    TabularRollout,
    TabularRolloutOptions,
)
from asyncflow_core.reference.tabular_trainer import (
    TABULAR_TRAINER,
    TabularTrainer,
    TabularTrainerOptions,
)


class RolloutOptions(TabularRolloutOptions):
    at_open: str = ""
    at_generate: str = ""
    refuses_from: int = 0
    slow: str = ""


class TrainerOptions(TabularTrainerOptions):
    at_open: str = ""
    at_step: str = ""
    after_updates: int = 0
    step_s: float = 0.0


async def misbehave(how):
    print("now:", how, flush=True)  # noqa: T201 - into the process's log
    match how:
        case "load" | "hang":
            await asyncio.sleep(3600)
        case "exit":
            os._exit(3)
        case "raise":
            raise RuntimeError("the engine broke")
        case "native":  # holds the GIL for ever: no thread, no signal handler of Python runs
            sum(itertools.repeat(0))
        case "children":
            start_children()


def start_children():
    subprocess.Popen(["sleep", "3600"])
    subprocess.Popen(["sleep", "3601"], start_new_session=True)


class Misbehaving(TabularRollout):
    _refuses = False

    async def open(self):
        await misbehave(self._options.at_open)
        await super().open()

    async def generate(self, requests):
        how = self._options.at_generate
        one = how == "refuse_one" and any(r.prompt_ids[-1] == 1 for r in requests)
        if how == "refuse" or one:
            raise DataError("the prompt is too long")
        await misbehave("hang" if how == "hang_once" and self._first() else how)
        if self._ctx.name == self._options.slow:
            await asyncio.sleep(0.5)
        async for completion in super().generate(requests):
            yield completion

    async def stage_weights(self, source):
        after = self._options.refuses_from
        if after and source.manifest.version >= after and (self._refuses or self._first()):
            self._refuses = True
            raise EngineError("there is no memory for a second set of weights")
        return await super().stage_weights(source)

    def _first(self):
        try:
            (self._ctx.run_dir / "first").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class MisbehavingTrainer(TabularTrainer):
    async def open(self):
        await misbehave(self._options.at_open)
        await super().open()

    async def optim_step(self):
        last = self._ctx.rank == self._ctx.world_size - 1
        if last and not self._options.after_updates:
            await misbehave(self._options.at_step)
        await asyncio.sleep(self._options.step_s)
        info = await super().optim_step()
        if last and info.updates > self._options.after_updates > 0:
            await misbehave(self._options.at_step)
        return info


@hookimpl
def asyncflow_register(registrar):
    registrar.add(
        "rollout",
        "misbehave",
        Misbehaving,
        api_version=1,
        options=RolloutOptions,
        capabilities=TABULAR_ROLLOUT,
    )
    registrar.add(
        "trainer",
        "misbehave",
        MisbehavingTrainer,
        api_version=1,
        options=TrainerOptions,
        capabilities=TABULAR_TRAINER,
    )
    registrar.add(
        "stage",
        "misbehave",
        _never_returning,
        api_version=1,
        contract=StageContract(
            ("response_ids",), ("reward", "reward_error"), partitions=("train", "eval")
        ),
    )


def _never_returning(options, ctx):
    def stage(batch):
        os.write(1, b"now: hangs\n")
        threading.Event().wait()

    return stage
