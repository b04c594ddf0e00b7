"""Every fault the suite injects: how, what is to happen, and what it may cost.

A run of tabular engines takes a second or two without a fault. Each fault has a line in
`docs/reliability.md`, which `WRITE_TABLE=1 make test-workflow` writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

RESTARTED = "it is started again, its rows go to others; the run completes"
ENDS = "the run ends with status 1 and names it"
RESUMES = "the run ends with status 1 and names it; `--resume` completes it"
STORE_RESTARTED = "the store starts it again; the run completes"
UNHARMED = "nothing ends; the run completes"
GIVEN_UP = "its process is ended and started again; its rows count as reward errors"

NOTHING = "nothing"
BEGUN = "responses that were begun are generated again"
UNSAVED = "what no checkpoint holds"
AFTER = "steps after the checkpoint are made again"

Inject = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: as the table names it.
        inject: does it to a run; None for one that is in the settings.
        sign: what the run says when it has noticed; empty for nothing.
        happens: in the words of the table, which the test holds the run to.
        lost: likewise.
        settings: of the run, beside the usual.
        at_step: when it is injected.
        begins: what the run or a log says when a fault of the settings begins.
        place: "network" for a run in a network of its own, "disk" for one on a small disk.
    """

    name: str
    happens: str
    lost: str = NOTHING
    inject: Inject | None = None
    sign: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    at_step: int = 4
    begins: str = ""
    place: str = ""


def kill(*names: str) -> Inject:
    async def inject(run: Any) -> None:
        for name in names:
            run.named(name).kill()

    return inject


def stop(name: str, seconds: float | None = None) -> Inject:
    """SIGSTOP, and SIGCONT after so long."""

    async def inject(run: Any) -> None:
        process = run.named(name)
        process.suspend()
        if seconds is not None:
            await run.pause(seconds)
            # A shard is not on the way of those who share its memory: the run may have ended.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    return inject


async def kill_at_random(run: Any) -> None:
    """Workers, twelve times, each at a moment that nothing is made to fit."""
    await run.kill_at_random(["rollout-0", "rollout-1", "reward-0", "advantage-0"], 12)


async def kill_the_run(run: Any) -> None:
    run.process.kill()


async def cut(run: Any) -> None:
    """The network of the run is gone for a while."""
    run.net("link", "set", "lo", "down")
    await run.pause(5.0)
    run.net("link", "set", "lo", "up")


async def cut_for_good(run: Any) -> None:
    run.net("link", "set", "lo", "down")


async def fill_the_disk(run: Any) -> None:
    run.fill_the_disk()


STUCK_S = 5.0
STUCK = {"watchdog__stuck_s": STUCK_S}
SAID_STUCK = "gave no sign of life for 5 s"
KILLED = "was killed by signal 9"
SAVED = {"checkpoint": {"every": 2}}
ZMQ = {"data_store": {"plugin": "zmq"}}
DURABLE = {"data_store": {"plugin": "zmq", "options": {"durability": "journal"}}}
TCP = {"data_store": {"plugin": "zmq", "options": {"bind": "tcp://127.0.0.1:*"}}}
LONG = {"workflow__steps": 10_000}


def reward(function: str, **more: Any) -> dict[str, Any]:
    return {
        "stages__reward": {
            "function": f"functions:{function}",
            "kind": "reward",
            "rows": 8,
            **more,
        },
        "workflow__steps": 3,
        "workflow__group_size": 2,
    }


FAULTS = (
    Fault(
        "kill -9 of a rollout replica, of two", RESTARTED, BEGUN, kill("rollout-1"), KILLED,
        {"rollout__replicas": 2},
    ),
    Fault("kill -9 of the only rollout replica", RESTARTED, BEGUN, kill("rollout-0"), KILLED),
    Fault("kill -9 of all rollout replicas at once", RESTARTED, BEGUN,
          kill("rollout-0", "rollout-1"), KILLED, {"rollout__replicas": 2}),
    Fault("kill -9 of a reward's process", RESTARTED, NOTHING, kill("reward-0"), KILLED),
    Fault("kill -9 of an advantage's process, which holds whole groups", RESTARTED, NOTHING,
          kill("advantage-0"), KILLED),
    Fault("kill -9 of workers at random moments, 12 times", RESTARTED, BEGUN, kill_at_random,
          KILLED,
          {"rollout__replicas": 2, "watchdog__restarts": 12, "workflow__steps": 250}),
    Fault("kill -9 of the trainer", RESUMES, AFTER, kill("trainer-0"), f"trainer-0 {KILLED}",
          {**SAVED, **LONG}),
    Fault("kill -9 of the trainer, with watchdog.on_trainer_death resume",
          "the run goes on from its checkpoint by itself and completes", AFTER, kill("trainer-0"),
          f"trainer-0 {KILLED}", {**SAVED, "watchdog__on_trainer_death": "resume"}),
    Fault("kill -9 of one of two trainer ranks", RESUMES, AFTER, kill("trainer-1"),
          f"trainer-1 {KILLED}", {**SAVED, **LONG, "trainer__world_size": 2}),
    Fault("kill -9 of the store's controller, durability journal", STORE_RESTARTED, NOTHING,
          kill("store controller"), "is started again", DURABLE),
    Fault("kill -9 of a shard of the store, durability journal", STORE_RESTARTED, NOTHING,
          kill("store shard"), "is started again", DURABLE),
    Fault("kill -9 of the store's controller, durability none", RESUMES, AFTER,
          kill("store controller"), "peer_lost", {**SAVED, **ZMQ, **LONG}),
    Fault("kill -9 of a shard of the store, durability none", STORE_RESTARTED, NOTHING,
          kill("store shard"), "is started again", ZMQ),
    Fault("kill -9 of the run's own process",
          "the guard ends all its processes; `--resume` completes it", AFTER, kill_the_run, "",
          {**SAVED, **LONG}),
    Fault("kill -9 of the guard", UNHARMED, NOTHING, kill("guard")),
    Fault("SIGSTOP of a rollout replica", RESTARTED, BEGUN, stop("rollout-1"), SAID_STUCK,
          {"rollout__replicas": 2, **STUCK}),
    Fault("SIGSTOP of a rollout replica, SIGCONT after 2 s", UNHARMED, NOTHING,
          stop("rollout-0", 2.0), "", STUCK),
    Fault("SIGSTOP of a reward's process", RESTARTED, NOTHING, stop("reward-0"), SAID_STUCK, STUCK),
    Fault("SIGSTOP of a reward's process, SIGCONT after 2 s", UNHARMED, NOTHING,
          stop("reward-0", 2.0), "", STUCK),
    Fault("SIGSTOP of the trainer", RESUMES, AFTER, stop("trainer-0"), f"trainer-0 {SAID_STUCK}",
          {**STUCK, **SAVED, **LONG}),
    Fault("SIGSTOP of one of two trainer ranks", RESUMES, AFTER, stop("trainer-1"),
          f"trainer-1 {SAID_STUCK}", {**STUCK, **SAVED, **LONG, "trainer__world_size": 2}),
    Fault("SIGSTOP of the trainer, SIGCONT after 2 s", UNHARMED, NOTHING, stop("trainer-0", 2.0),
          "", STUCK),
    Fault("SIGSTOP of the run's own process (Ctrl-Z), SIGCONT after 20 s", UNHARMED, NOTHING,
          stop("run", 20.0)),
    Fault("SIGSTOP of the run's own process with the zmq store, SIGCONT after 20 s", UNHARMED,
          NOTHING, stop("run", 20.0), "", ZMQ),
    Fault("SIGSTOP of the store's controller, SIGCONT after 5 s", UNHARMED, NOTHING,
          stop("store controller", 5.0), "", ZMQ),
    Fault("SIGSTOP of a shard of the store, SIGCONT after 5 s", UNHARMED, NOTHING,
          stop("store shard", 5.0), "", ZMQ),
    Fault("SIGSTOP of the store's controller", RESUMES, AFTER, stop("store controller"),
          "peer_lost", {**SAVED, **ZMQ, **LONG}),
    Fault("a rollout replica that is 20 times slower, of two", UNHARMED, NOTHING, settings={
        "rollout__replicas": 2, "rollout__plugin": "misbehave",
        "rollout__options__slow": "rollout-1", "rollout__rows_in_flight": 4,
    }),
    Fault("a reward that is slower than the trainer", UNHARMED, NOTHING,
          settings={"stages__reward": {"function": "functions:slow", "kind": "reward"},
                    "workflow__steps": 8}),
    Fault("the network between all processes and the store is cut for 5 s", UNHARMED, NOTHING, cut,
          "", TCP, place="network"),
    Fault("the network between all processes and the store is cut for good", RESUMES, AFTER,
          cut_for_good, "peer_lost", {**SAVED, **TCP, **LONG}, place="network"),
    Fault("a full disk", RESUMES, AFTER, fill_the_disk,
          "No space left on device", {**SAVED, **LONG}, place="disk"),
    Fault("a reward that never returns", GIVEN_UP, NOTHING, None, "did not return",
          reward("never_for_c", timeout_s=1.0), begins="now: never"),
    Fault("a reward that never returns and holds the GIL", GIVEN_UP, NOTHING, None, SAID_STUCK,
          {**reward("native_for_c"), **STUCK}, begins="now: native"),
    Fault("a reward that takes its process with it", GIVEN_UP, NOTHING, None, "ended with status 3",
          reward("ends_for_c"), begins="now: ends"),
    Fault("a reward that never returns, on a thread of the run", ENDS, UNSAVED, None,
          "cannot be ended",
          {"stages__reward": {"plugin": "misbehave", "timeout_s": 1.0}, **LONG},
          begins="now: hangs"),
    Fault("a reward that raises for one prompt",
          "its rows count 0 and as reward errors; the run completes",
          NOTHING, None, "a reward failed and counts 0",
          {"stages__reward": {"function": "functions:raises_for_c", "kind": "reward"}}),
    Fault("a reward that raises each time",
          "the run ends after the first step with status 1 and names it", UNSAVED, None,
          "rewards of step 1 failed, so it learned nothing",
          {"stages__reward": {"function": "functions:raises", "kind": "reward"}}),
    Fault("a rollout engine that raises each time", "after 3 restarts the run ends and names it",
          UNSAVED, None, "the engine broke",
          {"rollout__plugin": "misbehave", "rollout__options": {"at_generate": "raise"}},
          begins="now: raise"),
    Fault("a rollout engine that never returns, once", RESTARTED, BEGUN, None,
          "it holds for 2 s (rollout.timeout_s)",
          {"rollout__plugin": "misbehave", "rollout__timeout_s": 2.0, "rollout__replicas": 2,
           "rollout__options__at_generate": "hang_once"}, begins="now: hang"),
    Fault("a rollout engine that takes no more weights", RESTARTED, BEGUN, None,
          "cannot be brought to weights version",
          {"rollout__plugin": "misbehave", "rollout__options__refuses_from": 3},
          begins="failed to take weights"),
)  # fmt: skip


def table(rows: Mapping[str, float | None]) -> str:
    """In Markdown; `rows` has the seconds until a fault was noticed, None where it need not be."""
    lines = [
        "| fault injected | noticed after | what happened | what was lost |",
        "|---|---|---|---|",
    ]
    for fault in FAULTS:
        seconds = rows[fault.name]
        noticed = "-" if seconds is None else f"{seconds:.1f} s"
        lines.append(f"| {fault.name} | {noticed} | {fault.happens} | {fault.lost} |")
    return "\n".join(lines) + "\n"


__all__ = ["FAULTS", "Fault", "table"]
