"""Making checkpoints as steps complete, and bringing a run back to one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import replace

from asyncflow_core.config import RunConfig
from asyncflow_core.errors import DataError
from asyncflow_core.flow.processes.control import TrainerControl
from asyncflow_core.flow.running.checkpoint import Checkpoint, Checkpoints
from asyncflow_core.flow.running.folder import RunFolder
from asyncflow_core.flow.running.resume import TOTALS
from asyncflow_core.flow.running.supply import Supply
from asyncflow_core.flow.running.totals import Totals
from asyncflow_core.services.data_store import NO_DROPS, DataStore, SupportsDurability

__all__ = ["Saving", "bring_back_rows"]

_log = logging.getLogger(__name__)


async def bring_back_rows(store: DataStore, version: int, *, exact: bool) -> bool:
    """Before anybody leases: let a store that outlived the last life forget what is void.

    Returns:
        Whether its rows are used. Else all that are not trained are generated again.
    """
    if not isinstance(store, SupportsDurability):
        return False
    if not exact:
        try:
            await store.restore(version)
        except DataError as error:
            _log.warning("all rows that are not trained are generated again: %s", error)
        else:
            return True
    await store.clear()
    return False


class Saving:
    """Checkpoints of one life of a run.

    A checkpoint is made in two parts. `begin` is before the next step: the trainer writes what it
    has. `finish` is beside it, once everything of the completed step is recorded: the record is
    written, the checkpoint counts, and the store may forget what it covers.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        trainer: TrainerControl,
        supply: Supply,
        store: DataStore,
        totals: Totals,
    ) -> None:
        """Take what is to be saved."""
        self._config = config
        self._folder = folder
        self._trainer = trainer
        self._supply = supply
        self._store = store
        self._totals = totals
        self._checkpoints = Checkpoints(folder.path)

    def due(self, version: int) -> bool:
        """Whether there is to be a checkpoint after this many steps."""
        every, last = self._config.checkpoint.every, self._config.workflow.steps
        return every > 0 and (version % every == 0 or version == last)

    async def load(self) -> None:
        """Bring the trainer to where the run is resumed from; nothing in a run's first life."""
        start = self._folder.start
        if start.trainer is None:
            return
        await self._trainer.load(str(start.trainer))
        await self._told(start.version)  # the last life may not have come to it

    async def let_go(self, version: int) -> None:
        """A run that makes no checkpoints will never go back: its store need not keep for that."""
        durable = self._config.data_store.options.get("durability", "none") != "none"
        if durable and not self._config.checkpoint.every:
            await self._told(version)

    async def _told(self, version: int) -> None:
        if isinstance(self._store, SupportsDurability):
            await self._store.checkpoint(version)

    async def begin(self, version: int) -> float:
        """Let the trainer write; seconds it took."""
        began = time.perf_counter()
        path = await asyncio.to_thread(self._checkpoints.begin, version)
        await self._trainer.save(str(path))
        return time.perf_counter() - began

    async def finish(self, version: int) -> None:
        """From now on the checkpoint counts."""
        start = self._folder.start
        dropped = Counter((await self._store.stats(drops_after=NO_DROPS)).rows_dropped)
        totals = replace(
            self._totals,
            rows_evaluated=self._totals.rows_evaluated + self._supply.rows_evaluated,
            rows_dropped=self._totals.rows_dropped + dropped,
        )
        checkpoint = Checkpoint(
            version=version,
            life=start.life,
            assigned=self._supply.assigned.dump(),
            notes=start.notes + self._supply.notes,
            totals=TOTALS.dump_python(totals, mode="json"),
            config=self._config.model_dump(mode="json"),
        )
        await asyncio.to_thread(self._folder.sync)
        await asyncio.to_thread(self._checkpoints.finish, checkpoint)
        await self._told(version)
        await asyncio.to_thread(self._checkpoints.prune, self._config.checkpoint.keep)
