"""Log-probs by the first weights of a step, for losses that keep near them over several updates.

A task of the store like any other, which the trainer's worker does itself, beside the gradients of
the step's first update: it reads whole groups of the step's batch and writes `proximal_logprobs`,
which `train` waits for. The first update waits until all of the batch has them.

Source: decoupled PPO, arXiv:2110.00641; AReaL, arXiv:2505.24298 section 5.
"""

from __future__ import annotations

import asyncio
import logging

from asyncflow_core.batch import Batch
from asyncflow_core.errors import LeaseLostError
from asyncflow_core.flow.planning.stages import LOGPROB_READS
from asyncflow_core.flow.working.fanout import Ranks
from asyncflow_core.flow.working.worker import LeaseKeeper
from asyncflow_core.services.data_store import DataStore, Lease, Order, Registration, TaskSpec

__all__ = ["PROXIMAL", "Proximal", "proximal_task"]

PROXIMAL = "proximal_logprobs"

_log = logging.getLogger(__name__)

_WAIT_S = 5.0
"""Seconds one lease call waits inside the store; it bounds nothing, the loop asks again."""


def proximal_task() -> TaskSpec:
    """What the store sees."""
    return TaskSpec(
        "proximal",
        LOGPROB_READS,
        (PROXIMAL,),
        whole_groups=True,
        order=Order.STEP,
    )


class Proximal:
    """Works on one step's batch at a time.

    Concurrency: `serve` runs beside the gradients; the ranks take turns between the two.
    """

    def __init__(
        self,
        store: DataStore,
        ranks: Ranks,
        task: TaskSpec,
        keeper: LeaseKeeper,
        *,
        groups_per_step: int,
        lease_s: float,
    ) -> None:
        """Keep the arguments; `keeper` renews what is worked on."""
        self._store = store
        self._ranks = ranks
        self._task = task
        self._keeper = keeper
        self._groups_per_step = groups_per_step
        self._lease_s = lease_s
        self._registration: Registration | None = None

    async def register(self) -> None:
        """Announce the task; rows put from now on are seen."""
        self._registration = await self._store.register(self._task)

    async def serve(self, version: int, complete: asyncio.Event) -> None:
        """Compute the batch of step `version` until cancelled; `complete` once all of it is done.

        A group that takes the place of one dropped later gets log-probs of the weights there are
        then, which is counted as nothing but said: the step's first weights are gone.
        """
        groups: set[tuple[int, int, int]] = set()
        while True:
            lease = await self._store.lease(
                self._task.name,
                requester="trainer",
                version=version,
                lease_s=self._lease_s,
                wait_s=_WAIT_S,
            )
            if lease is None:
                continue
            if complete.is_set():
                _log.warning(
                    "step %d: %d late rows get later weights' log-probs as proximal",
                    version,
                    len(lease.rows),
                )
            if await self._compute(lease):
                groups |= {info.key.group for info in lease.rows}
            if len(groups) >= self._groups_per_step:
                complete.set()

    async def _compute(self, lease: Lease) -> bool:
        """Whether the rows have theirs now."""
        self._keeper.hold(lease.lease_id)
        try:
            tokens = [info.tokens for info in lease.rows]
            found = await self._ranks.forward([lease.ref()], tokens, LOGPROB_READS)
            await self._store.commit(lease.ref(), writes=Batch({PROXIMAL: found["logprobs"]}))
        except LeaseLostError as error:
            _log.warning("the trainer's forward: %s; the rows are done again", error)
            return False
        finally:
            self._keeper.let_go(lease.lease_id)
        return True
