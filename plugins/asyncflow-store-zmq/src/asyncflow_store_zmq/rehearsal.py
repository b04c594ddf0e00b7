"""While rows come slowly, a controller rehearses, so that the next finds its code in the caches.

A row takes a controller 0.1 ms, and 0.3 where others used the processor's caches since the last
one: a training step, another guest of the machine (`benchmarks/store_stages.py`). At a row every
20 ms that is a good part of its way to who waits for it. So while hand-outs wait, and one was
answered within the last second, a row is done every 4 ms for nobody: by a second controller in the
same process, an understudy, which has no memory and gets its calls through a socket, as clients
send them. Nothing of the store's own state is touched.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from asyncflow_core.batch import Batch, Column
from asyncflow_core.errors import InvariantError
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.wire import WIRE_VERSION, Encoder, Limits, decode
from asyncflow_store_zmq.arena import UNIT
from asyncflow_store_zmq.extents import LENT_BYTES, Extent, Hole
from asyncflow_store_zmq.handouts import Handouts
from asyncflow_store_zmq.lane import CHUNK, Inbox, framed
from asyncflow_store_zmq.lane_server import Answer, LaneServer
from asyncflow_store_zmq.layout import pack
from asyncflow_store_zmq.packed import dump_keys, dump_rows
from asyncflow_store_zmq.payload import lines_of
from asyncflow_store_zmq.shards import Shards
from asyncflow_store_zmq.spec import StoreSpec

__all__ = ["NoMemory", "Rehearsal"]

_log = logging.getLogger(__name__)
_EVERY_S = 0.004
_LATELY_S = 1.0
_COLUMNS = {"prompt_ids": np.int32, "response_ids": np.int32, "behaviour_logprobs": np.float32}
_ROW_BYTES = 64

Script = Generator[list[list[Any]], list[Any], None]


class NoMemory(Shards):
    """One shard of an understudy: what lies in it is not looked at by any controller."""

    def __init__(self, spec: StoreSpec) -> None:
        """Everything in it is new."""
        super().__init__(spec)
        self._generations = itertools.count(1)

    def raise_generation(self, shard: int, slot: int) -> int:
        """See `Shards`."""
        return next(self._generations)

    def lent(self, extent: Extent) -> None:
        """Nobody comes later who would want to know."""

    def punch(self, holes: Iterable[Hole]) -> None:
        """There are no pages."""


class Understudy(Protocol):
    """A controller, as far as it is used here."""

    @property
    def answers(self) -> Mapping[str, Answer]:
        """Its methods."""

    async def aclose(self) -> None:
        """End it."""


class Rehearsal:
    """When to rehearse, and what.

    Attributes:
        times: rows that were done for nobody.
    """

    def __init__(
        self, understudy: Callable[[], Understudy], handouts: Handouts, clock: Callable[[], float]
    ) -> None:
        """Nothing yet.

        Args:
            understudy: makes a controller over `NoMemory`, when the first row is rehearsed.
            handouts: of the store; they tell `came`.
            clock: of the store, seconds.
        """
        self._make, self._handouts, self._clock = understudy, handouts, clock
        self._rows, self._seen, self._lately = 0, 0, 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stage: _Stage | None = None
        self._understudy: Understudy | None = None
        self._failed = False
        self.times = 0

    def came(self) -> None:
        """Somebody who waited was given rows: from now on, until nothing comes any more."""
        self._rows += 1
        if self._timer is None:
            self._later()

    async def aclose(self) -> None:
        """End the understudy. Idempotent."""
        self._failed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._stage is not None:
            await self._stage.aclose()
        if self._understudy is not None:
            await self._understudy.aclose()

    def _next(self) -> None:
        now = self._clock()
        if self._rows != self._seen:  # what has just been done needs no rehearsal
            self._seen, self._lately = self._rows, now
        elif now - self._lately >= _LATELY_S:
            self._timer = None
            return
        elif self._handouts.waiting:
            self._rehearse()
        self._later()

    def _later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None if self._failed else loop.call_later(_EVERY_S, self._next)

    def _rehearse(self) -> None:
        try:
            if self._stage is None:
                self._understudy = self._make()
                self._stage = _Stage(self._understudy.answers)
            self.times += self._stage.step()
        except Exception:  # noqa: BLE001 - logged in full; the store goes on without
            self._failed = True
            _log.exception("store: the controller rehearses no more")


class _Stage:
    """The understudy's one client: a producer and a reader."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        token = "rehearsal"  # noqa: S105 - of a socket that nobody else has
        self._server = LaneServer(None, token=token, methods=answers)
        self._sock = self._server.connect()
        self._sock.setblocking(False)
        self._encoder, self._inbox = Encoder(), Inbox(Limits())
        self._script = _script(token)
        self._send(next(self._script))

    async def aclose(self) -> None:
        """Leave."""
        self._sock.close()
        await self._server.aclose()

    def step(self) -> bool:
        """Send what comes next; False while the loop has not come to answer what was sent."""
        try:
            self._inbox.add(self._sock.recv(CHUNK))
        except BlockingIOError:
            return False
        answers = []
        while (parts := self._inbox.take()) is not None:
            answers.append(decode(parts, limits=self._inbox.limits))
        self._send(self._script.send(answers))
        return True

    def _send(self, messages: list[list[Any]]) -> None:
        parts = [part for message in messages for part in framed(self._encoder.encode(message))]
        self._sock.sendmsg(parts)


def _script(token: str) -> Script:
    """Yields messages and is sent what they were answered: a row is put, handed out, done."""
    task = TaskSpec("rehearsal", tuple(_COLUMNS))
    row = {name: Column.ragged([np.zeros(3, dtype)]) for name, dtype in _COLUMNS.items()}
    layout = pack(Batch(row)).layout.dump()
    asking = [task.name, "reader", None, 1, None, "fifo", 60.0, 60.0]
    facts = struct.pack("<i", 6), struct.pack("<i", -1)  # tokens, and versions: none
    yield [[WIRE_VERSION, token, "rehearsal"]]
    begin = [
        [task.name, list(task.reads), [], False, list(task.partitions), task.order.value, 0],
        [LENT_BYTES, []],
    ]
    answers = yield [[0, "register", begin[0]], [1, "lend", begin[1]]]
    extent = _values(answers)[1]
    start = extent[1] * UNIT
    commits: list[list[Any]] = []
    for sequence in itertools.count():
        last = start + 2 * _ROW_BYTES > extent[1] * UNIT + extent[2]  # that lies in this extent
        put = [
            [*extent[:2], start, _ROW_BYTES, 1, layout], dump_keys([(0, 0, sequence)], 3),
            *facts, 1, None, "train", 0, None, [[extent[:2]], LENT_BYTES] if last else [[], 0],
        ]  # fmt: skip
        answers = yield [[2, "turn", [commits, asking]], [3, "put", put]]
        values = _values(answers)
        lease_id, lines, sources, *_ = values[2][1]
        rows = dump_rows(lines_of(lines, sources)[0].tolist())
        commits = [[lease_id, lease_id, rows, None, None, None, None, [[], 0]]]
        start += _ROW_BYTES
        if last:
            extent = values[3][2]
            start = extent[1] * UNIT


def _values(answers: list[Any]) -> dict[int, Any]:
    """Of calls, by their numbers.

    Raises:
        InvariantError: one failed.
    """
    failed = [answer for answer in answers if len(answer) != 2]
    if failed:
        raise InvariantError(f"the understudy refused calls that a controller takes: {failed}")
    return dict(answers)
