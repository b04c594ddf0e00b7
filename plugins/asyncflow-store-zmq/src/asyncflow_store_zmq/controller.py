"""The controller: the table behind a socket. It waits, tells the time, and never sees payload.

Every call is one list, answered at once unless it has to wait: for rows, for room, for a disk.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from asyncflow_core.batch import BatchRef, Key
from asyncflow_core.errors import (
    AsyncFlowError,
    BackpressureError,
)
from asyncflow_core.ledger import Admission, LeasePolicy
from asyncflow_core.services.data_store import Order, TaskSpec
from asyncflow_core.wire import Method, Peer, Server
from asyncflow_store_zmq.announced import Announced
from asyncflow_store_zmq.calls import check_call
from asyncflow_store_zmq.durable import Durable, first_lease
from asyncflow_store_zmq.handouts import Handouts, Later
from asyncflow_store_zmq.incoming import Incoming
from asyncflow_store_zmq.lane import lane_of
from asyncflow_store_zmq.lane_server import LaneServer
from asyncflow_store_zmq.packed import facts_of, keys_of, load_rows
from asyncflow_store_zmq.payload import Handout, Written
from asyncflow_store_zmq.producers import Producers
from asyncflow_store_zmq.pulse import Pulse
from asyncflow_store_zmq.registrations import Registrations
from asyncflow_store_zmq.rehearsal import NoMemory, Rehearsal
from asyncflow_store_zmq.shard import message
from asyncflow_store_zmq.shards import Shards
from asyncflow_store_zmq.spec import StoreSpec
from asyncflow_store_zmq.table import Table
from asyncflow_store_zmq.unwritten import drop_unwritten

__all__ = ["Controller"]

_log = logging.getLogger(__name__)
_TICK_S = 1.0
_METHODS = (
    "hello", "register", "end", "put", "lend", "lease", "find", "missing", "commit", "turn",
    "renew", "release", "evict", "drop", "stats", "layout", "memory", "checkpoint", "restore",
    "hurry", "add_shard", "notify", "weights",
)  # fmt: skip


class Controller:
    """Answers `store.*`.

    Owns the table; between two awaits it is whole, so there are no locks but the queue of producers
    that wait for room.
    """

    def __init__(
        self,
        spec: StoreSpec,
        clock: Callable[[], float] = time.monotonic,
        shards: Shards | None = None,
    ) -> None:
        """Prepare; `open` connects to the shards."""
        self._spec = spec
        self._clock = clock
        self._shards = Shards(spec) if shards is None else shards
        self._table = Table(
            capacity_rows=spec.capacity_rows,
            capacity_bytes=spec.capacity_bytes,
            max_staleness=spec.max_staleness,
            max_gap_s=spec.max_gap_s,
            raise_generation=self._shards.raise_generation,
            first_lease=first_lease(spec),
            policies=_policies(spec.lease_policies),
            remember_rows=spec.remember_rows,
        )
        self._handouts = Handouts(
            self._try_lease, self._give_back, self._table.ledger.ready_rows, lambda: self._follow()
        )
        self._producers = Producers(self._table.advance_put, lambda: self._follow())
        self._drops = Pulse()
        self._announced = Announced()
        self._registrations = Registrations()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._ticker: asyncio.Task[None] | None = None
        self._durable: Durable | None = None
        self.answers = {name: self._guarded(name) for name in _METHODS}
        self._lane: LaneServer | None = None
        self._rehearsal = Rehearsal(self._understudy, self._handouts, clock)
        if spec.rehearse:
            self._handouts.served = self._rehearsal.came

    async def open(self) -> None:
        """Connect to every shard, map its memory, read the journal back."""
        for address in self._spec.shard_addresses:
            await self._add_shard(address)
        if self._spec.durability != "none":
            self._durable = Durable(self._spec, self._table, self._shards.arenas, self._shards.sync)
            self._durable.open()
            self._registrations.again(self._table.tasks())
        self._ticker = asyncio.create_task(self._tick())
        path = lane_of(self._spec.address)
        if path is not None:
            self._lane = LaneServer(path, token=self._spec.token, methods=self.answers)
            await self._lane.open()

    async def aclose(self) -> None:
        """Let go of clients and shards."""
        if self._lane is not None:
            await self._lane.aclose()
        if self._ticker is not None:
            self._ticker.cancel()
        await self._rehearsal.aclose()
        if self._timer is not None:
            self._timer.cancel()
        if self._durable is not None:
            await self._durable.aclose()
        await self._shards.aclose()

    def _understudy(self) -> Controller:
        spec = dataclasses.replace(
            self._spec, durability="none", lease_policies=(), remember_rows=1, rehearse=False
        )
        understudy = Controller(spec, self._clock, NoMemory(spec))
        understudy._table.pool.add_shard()
        return understudy

    async def _add_shard(self, address: str) -> None:
        await self._shards.add(address)
        self._table.pool.add_shard()

    def add_shard(self, m: list[Any], peer: Peer) -> Any:
        """[address]: one more shard, the next in number, answers there."""
        return self._add_shard(str(m[0]))

    def expose(self, server: Server) -> None:
        """Offer the methods."""
        methods = {
            name: Method(_in_a_task(function), message, takes_peer=True, inline=True)
            for name, function in self.answers.items()
        }
        server.expose("store", methods, interface="ZmqDataStore", api_version=1)

    def _guarded(self, name: str) -> Callable[..., Any]:
        """Check every call's form first, and follow up after it."""
        function: Callable[[list[Any], Peer], Any] = getattr(self, name)

        def call(m: list[Any], peer: Peer) -> Any:
            check_call(name, m)
            try:
                value = function(m, peer)
                return value if self._durable is None else self._durable.answer(value)
            finally:
                self._follow()

        return call

    # Calls

    def hello(self, m: list[Any], peer: Peer) -> list[Any]:
        """Where a client's memory is, and a first extent."""
        paths = [str(arena.path) for arena in self._shards.arenas]
        return [paths, self._shards.addresses, sorted(self._table.ledger.policies)]

    def register(self, m: list[Any], peer: Peer) -> str:
        """[name, reads, writes, whole_groups, partitions, order, batch_groups] -> handle."""
        name, reads, writes, whole, partitions, order, batch_groups = m
        spec = TaskSpec(
            name, tuple(reads), tuple(writes), whole, tuple(partitions), Order(order), batch_groups
        )
        handle = self._registrations.take_over(spec, peer)
        if handle is None:
            self._table.register(spec)
            handle = self._registrations.add(spec, peer)
        return handle

    def end(self, m: list[Any], peer: Peer) -> None:
        """[handle]."""
        task = self._registrations.end(m[0])
        if task is not None:
            self._table.leave(task.name, self._clock())

    def put(self, m: list[Any], peer: Peer) -> Any:
        """[written, keys, tokens, oldest, samples, batch, partition, row_bytes, wait_s, memory]."""
        written, keys, tokens, oldest, samples, batch, partition, row_bytes, wait_s, memory = m
        names = self._table.payload.layout_of(written[5]).names
        put = self._table.begin_put(
            peer,
            Written(*written),
            keys_of(keys, 3),
            Admission(names, samples, batch, partition, row_bytes),
            facts_of(tokens),
            facts_of(oldest),
        )
        try:
            lent = self._memory(memory, peer)
            if self._producers.turn.locked() or not self._table.advance_put(put):
                return self._wait_put(put, wait_s, lent, peer)
        except AsyncFlowError:
            self._table.end_put(put, self._clock())
            raise
        self._table.end_put(put, self._clock())
        return [put.stored, len(put.keys) - put.stored, lent]

    async def _wait_put(
        self, put: Incoming, wait_s: float | None, lent: Any, peer: Peer
    ) -> list[Any]:
        try:
            await self._producers.wait(put, wait_s)
        except BaseException:
            if lent is not None and peer.alive:  # its client does not hear of it
                self._memory([[lent[:2]], 0], peer)
            raise
        finally:
            self._table.end_put(put, self._clock())
            self._follow()
        return [put.stored, len(put.keys) - put.stored, lent]

    def lend(self, m: list[Any], peer: Peer) -> list[int]:
        """[nbytes, memory]: an extent of that size."""
        self._memory([m[1], 0], peer)
        return self._lend(peer, m[0])

    def _memory(self, m: list[Any], peer: Peer) -> list[int] | None:
        """[sealed extents, bytes wanted]: take some back, lend another ahead, if there is any."""
        sealed, wanted = m
        for shard, slot in sealed:
            self._table.pool.seal(self._table.pool.find(peer, shard, slot, slot << 20, 0))
        try:
            return self._lend(peer, wanted) if wanted else None
        except BackpressureError:  # what it came with is done; who needs memory now asks by `lend`
            return None

    def _lend(self, peer: Peer, nbytes: int) -> list[int]:
        extent = self._table.pool.lend(peer, nbytes)
        self._shards.lent(extent)
        return [extent.shard, extent.slot, extent.nbytes]

    def lease(self, m: list[Any], peer: Peer) -> Any:
        """[task, requester, version, limit_rows, limit_tokens, policy, lease_s, wait_s]."""
        return self._hand_out(m, peer, lambda found: found)

    def _hand_out(self, m: list[Any], peer: Peer, shape: Callable[[Any], Any]) -> Any:
        found = self._try_lease(m)
        if found is not None or m[7] <= 0:
            return shape(found)
        return self._handouts.wait(m, peer, shape)

    def _try_lease(self, m: list[Any]) -> list[Any] | None:
        task, requester, version, limit_rows, limit_tokens, policy, lease_s, _ = m
        now = self._clock()
        handout = self._table.lease(
            now,
            task,
            requester,
            version=version,
            limit_rows=limit_rows,
            limit_tokens=limit_tokens,
            policy=policy,
            lease_s=lease_s,
        )
        return None if handout is None else [*handout, now + lease_s]

    def _give_back(self, found: list[Any]) -> None:
        lease_id, rows = found[0], Handout(*found[:-1]).rows[0]
        self._table.release(self._clock(), BatchRef(lease_id, lease_id, tuple(rows.tolist())))

    def hurry(self, m: list[Any], peer: Peer) -> None:
        """[task, requester]: its hand-outs that wait end, with nothing."""
        self._handouts.hurry(peer, m[0], m[1])

    def find(self, m: list[Any], peer: Peer) -> list[Any]:
        """[lease, fence, rows, columns, extra]: where rows lie."""
        lease_id, fence, rows, columns, extra = m
        ref = BatchRef(lease_id, fence, load_rows(rows))
        return list(self._table.find(self._clock(), ref, columns, extra))

    def missing(self, m: list[Any], peer: Peer) -> int:
        """[lease, fence, rows]: what its holder could not read is dropped, if it is not there."""
        ref = BatchRef(m[0], m[1], load_rows(m[2]))
        return drop_unwritten(self._table, self._clock(), ref, self._shards.has)

    def commit(self, m: list[Any], peer: Peer) -> Any:
        """[lease, fence, rows, written, tokens, oldest, version, memory] -> counts and memory."""
        lease_id, fence, rows, written, tokens, oldest, version, memory = m
        result = self._table.commit(
            self._clock(),
            peer,
            BatchRef(lease_id, fence, load_rows(rows)),
            None if written is None else Written(*written),
            () if tokens is None else facts_of(tokens),
            () if oldest is None else facts_of(oldest),
            version,
        )
        return [
            result.committed, result.repeated, result.dropped, self._memory(memory, peer),
        ]  # fmt: skip

    def turn(self, m: list[Any], peer: Peer) -> Any:
        """[commits, lease or None]: what a reader did, and what it wants next, in one message.

        Commits that fail do not keep the others back: each has its own answer.
        """
        commits, lease = m
        answers: list[Any] = []
        for commit in commits:
            try:
                answers.append(self.commit(commit, peer))
            except AsyncFlowError as error:
                answers.append([error.code, str(error)])
        if lease is None:
            return [answers, None]
        return self._hand_out(lease, peer, lambda found: [answers, found])

    def renew(self, m: list[Any], peer: Peer) -> list[int]:
        """[leases, lease_s] -> lost ones."""
        return list(self._table.renew(self._clock(), m[0], m[1]))

    def release(self, m: list[Any], peer: Peer) -> None:
        """[lease, fence, rows]."""
        self._table.release(self._clock(), BatchRef(m[0], m[1], load_rows(m[2])))

    def evict(self, m: list[Any], peer: Peer) -> int:
        """[requester]."""
        return self._table.evict(self._clock(), str(m[0]))

    def drop(self, m: list[Any], peer: Peer) -> int:
        """[keys, reason]."""
        return self._table.drop(
            self._clock(), [Key(*key) for key in keys_of(m[0], 4).tolist()], m[1]
        )

    def stats(self, m: list[Any], peer: Peer) -> Any:
        """[drops_after, wait_s]."""
        drops_after, wait_s = m
        if wait_s > 0 and self._table.ledger.last_serial <= drops_after:
            return self._wait_stats(drops_after, wait_s)
        return self._stats(drops_after)

    async def _wait_stats(self, drops_after: int, wait_s: float) -> Any:
        deadline = asyncio.get_running_loop().time() + wait_s
        while self._table.ledger.last_serial <= drops_after:
            if not await self._drops.wait(deadline):
                break
        return self._stats(drops_after)

    def _stats(self, drops_after: int) -> Any:
        self._table.advance(self._clock())
        return dataclasses.replace(
            self._table.stats(drops_after),
            bytes=self._table.pool.nbytes,
            waiting_puts=self._producers.waiting,
        )

    def checkpoint(self, m: list[Any], peer: Peer) -> None:
        """[version]."""
        self._table.checkpoint(self._clock(), m[0])
        if self._durable is not None:
            self._durable.shorten()

    def restore(self, m: list[Any], peer: Peer) -> int:
        """[version]."""
        return self._table.restore(self._clock(), m[0])

    def notify(self, m: list[Any], peer: Peer) -> None:
        """[version, note]: new weights are there; the note is for who waits."""
        self._announced.announce(int(m[0]), m[1])

    def weights(self, m: list[Any], peer: Peer) -> Any:
        """[after, wait_s] -> [version, note] of weights newer than `after`, or None."""
        after, wait_s = m
        last = self._announced.last
        return last if last[0] > after else self._announced.newer(after, wait_s)

    def layout(self, m: list[Any], peer: Peer) -> bytes:
        """[number]."""
        return self._table.payload.layout(m[0])

    def memory(self, m: list[Any], peer: Peer) -> int:
        """[]: bytes the arenas take."""
        return self._shards.allocated()

    # Following up

    def _follow(self) -> None:
        """Wake who can go on, set the timer, give memory back."""
        table = self._table
        while table.ready:
            self._handouts.serve(table.ready.pop())
        if table.room:
            table.room = False
            self._producers.room()
        if table.dropped:
            table.dropped = False
            self._drops.fire()
        if table.pool.holes:
            self._shards.punch(table.pool.holes)
            table.pool.holes.clear()
        self._set_timer()

    def _set_timer(self) -> None:
        deadline = self._table.ledger.next_deadline()
        if self._timer is not None:
            if deadline is not None and self._due <= deadline:
                return  # it comes in time, and then sets the next
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._due = deadline
            delay = max(0.0, deadline - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._table.advance(self._clock())
        self._follow()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for holder in self._table.pool.holders():
                if isinstance(holder, Peer) and not holder.alive:
                    self._table.pool.seal_all(holder)
            self._table.pool.sweep(self._clock())
            self._follow()


def _in_a_task(function: Callable[..., Any]) -> Callable[..., Any]:
    """For core's server, in which what waits is a coroutine."""

    def call(m: list[Any], peer: Peer) -> Any:
        value = function(m, peer)
        return value.wait() if isinstance(value, Later) else value

    return call


def _policies(names: Sequence[str]) -> dict[str, LeasePolicy]:
    if not names:
        return {}
    # Not above: an idle controller would weigh half as much again.
    from asyncflow_core.registry import Registry

    return Registry().lease_policies(names)
