"""A run that kills itself with SIGKILL: `killed_run.py CONFIG|- RUN PLACE`.

CONFIG starts it, "-" resumes the run in the folder RUN. PLACE is seconds after the start (a
number), a place of `PLACES` with the how-manyth time it is reached (`rename:2`), perhaps with
seconds from then on (`stepped:3+0.05`), or "-" for never.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import signal
import sys
import threading

PLACES = {
    # name: (module, class or "", function, kill before or after it)
    "life": ("asyncflow_core.flow.running.folder", "", "begin_again", "before"),
    "verified": ("asyncflow_core.flow.running.resume", "", "_write_life", "before"),
    "counted": ("asyncflow_core.flow.running.resume", "", "_write_life", "after"),
    "cutting": ("asyncflow_core.flow.running.rewriting", "", "_rename", "before"),
    "cut": ("asyncflow_core.flow.running.rewriting", "", "_rename", "after"),
    "restoring": ("asyncflow_core.flow.running.saving", "", "bring_back_rows", "before"),
    "restored": ("asyncflow_core.flow.running.saving", "", "bring_back_rows", "after"),
    "loaded": ("asyncflow_core.flow.running.saving", "Saving", "load", "after"),
    "noted": ("asyncflow_core.flow.running.folder", "RunFolder", "note", "after"),
    "made": ("asyncflow_core.flow.running.checkpoint", "Checkpoints", "begin", "after"),
    "saved": ("asyncflow_core.flow.running.saving", "Saving", "begin", "after"),
    "recorded": ("asyncflow_core.flow.running.checkpoint", "", "_sync_tree", "after"),
    "rename": ("asyncflow_core.flow.running.checkpoint", "Checkpoints", "finish", "after"),
    "pruning": ("asyncflow_core.flow.running.checkpoint", "Checkpoints", "prune", "before"),
    "pruned": ("asyncflow_core.flow.running.checkpoint", "Checkpoints", "prune", "after"),
    "finished": ("asyncflow_core.flow.running.saving", "Saving", "finish", "after"),
    "stepped": ("asyncflow_core.flow.working.train", "TrainWorker", "step", "after"),
    "acknowledging": ("asyncflow_core.flow.working.leased", "LeasedRows", "acknowledge", "before"),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def owner_of(name: str) -> object:
    """The module or class whose function a place is."""
    module, owner, _, _ = PLACES[name]
    found = importlib.import_module(module)
    return getattr(found, owner) if owner else found


def arm(name: str, count: int, later_s: float) -> None:
    """Kill this process `later_s` after the `count`-th time the place is reached."""
    _, _, function, when = PLACES[name]
    found = owner_of(name)
    inner = getattr(found, function)
    left = count

    def reached(at: str) -> None:
        nonlocal left
        if at == when:
            left -= 1
            if not left and not later_s:
                die()
            if not left:
                threading.Timer(later_s, die).start()

    @functools.wraps(inner)
    def plain(*args: object, **kwargs: object) -> object:
        reached("before")
        result = inner(*args, **kwargs)
        reached("after")
        return result

    @functools.wraps(inner)
    async def waited(*args: object, **kwargs: object) -> object:
        reached("before")
        result = await inner(*args, **kwargs)
        reached("after")
        return result

    made = waited if asyncio.iscoroutinefunction(inner) else plain
    setattr(found, function, made)
    if function == "bring_back_rows":
        importlib.import_module("asyncflow_core.flow.running.controller").bring_back_rows = made


def main() -> None:
    config, run, place = sys.argv[1:]
    from asyncflow_core import Flow

    flow = Flow.resume(run) if config == "-" else Flow.from_config(config)
    name, colon, count = place.partition(":")
    if colon:
        number, _, later = count.partition("+")
        arm(name, int(number), float(later or 0))
    elif place != "-":
        threading.Timer(float(place), die).start()
    for _ in flow.run():
        pass
    os._exit(0)  # a timer may be left


if __name__ == "__main__":
    main()
