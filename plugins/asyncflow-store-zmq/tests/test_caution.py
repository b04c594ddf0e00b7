"""After a restart no memory is lent that a client of the earlier life may still write into."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncflow_store_zmq.arena import UNIT, Arena
from asyncflow_store_zmq.extents import ExtentPool

MIB = 1 << 20


def pool(shards=1):
    made = ExtentPool(lambda shard, slot: 1)
    for _ in range(shards):
        made.add_shard()
    return made


def units(extent):
    return set(range(extent.slot, extent.slot + extent.units))


@given(
    sizes=st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=12),
    kept=st.sets(st.integers(0, 11)),
    wanted=st.lists(st.integers(1, 40 * MIB), max_size=12),
)
def test_next_life_lends_nothing_of_the_earlier_one_until_it_is_safe(sizes, kept, wanted):
    before = pool()
    old = [before.lend("client", size) for size in sizes]
    top = max(extent.slot + extent.units for extent in old)
    after = pool()
    after.begin_replay([top])
    adopted = [
        after.adopt(extent.shard, extent.slot, extent.units)
        for number, extent in enumerate(old)
        if number in kept
    ]
    for extent in adopted:
        extent.segments += 1  # something lives in it
    after.end_replay()
    written = set().union(*map(units, old))
    after.sweep(100.0)
    after.sweep(119.0)
    new = [after.lend("other", size) for size in wanted]
    assert not written & set().union(*map(units, new))
    # Later what nothing lives in is used again, and nothing is lent twice.
    after.sweep(121.0)
    new.extend(after.lend("other", size) for size in sizes)
    taken = [unit for extent in [*adopted, *new] for unit in units(extent)]
    assert len(taken) == len(set(taken))
    if not adopted and len(sizes) == 1 and not wanted:
        assert set(taken) <= written


def test_arena_remembers_what_was_ever_lent(tmp_path):
    arena = Arena(tmp_path / "shard-0.arena", create=True)
    assert arena.top == 0
    arena.top = 17
    arena.close()
    again = Arena(tmp_path / "shard-0.arena")
    assert again.top == 17
    assert len(again.generations) * 4 == UNIT
    again.close()
