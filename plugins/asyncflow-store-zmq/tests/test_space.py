"""A client's borrowed memory: segments lie within what was lent, and apart from each other."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from asyncflow_store_zmq.arena import UNIT
from asyncflow_store_zmq.extents import LARGE_BYTES, ExtentPool, Segment
from asyncflow_store_zmq.memory import Space

SIZES = st.one_of(
    st.integers(1, 1 << 14),
    st.integers(1, 6 << 20),
    st.integers(1, LARGE_BYTES + (1 << 20)),
)


@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=30))
def test_segments_lie_within_lent_memory_and_apart(puts):
    pool, space, found = ExtentPool(lambda shard, slot: 0), Space(), []
    pool.add_shard()

    def lend(nbytes):
        extent = pool.lend("a", nbytes)
        return [extent.shard, extent.slot, extent.nbytes]

    for size, refused in puts:
        nbytes = -(-size // 64) * 64
        place = space.take(nbytes)
        if place is None:
            for shard, slot in space.full():
                pool.seal(pool.find("a", shard, slot, slot * UNIT, 0))
            place = space.take_from(lend(space.wish(nbytes)), nbytes)
        lent, start = place
        extent = pool.find("a", lent.shard, lent.slot, start, nbytes)  # what the controller checks
        pool.born(Segment(len(found), extent, start, nbytes, 1, 0, 1, 0))
        found.append((start, start + nbytes))
        report = space.report()
        for shard, slot in report[0]:
            pool.seal(pool.find("a", shard, slot, slot * UNIT, 0))
        lent.writing -= 1
        space.add(report, lend(report[1]) if report[1] and not refused else None)
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(sorted(found)))
