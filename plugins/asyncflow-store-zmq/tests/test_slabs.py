"""Memory of reads: used again, and never while somebody has an array in it."""

from __future__ import annotations

import gc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncflow_store_zmq.slabs import Slabs

BIG = 1 << 17


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_that_nobody_has_is_used_again():
    slabs = Slabs()
    first = address(slabs.take(BIG))
    assert address(slabs.take(BIG - 8)) == first


def test_memory_with_a_view_of_a_view_is_not():
    slabs = Slabs()
    memory = slabs.take(BIG)
    kept = memory.view(np.float32).reshape(-1, 8)[5:7, 1]
    buffer = memoryview(memory.view(np.int64)[3:4])
    first = address(memory)
    del memory
    assert address(slabs.take(BIG)) != first
    del kept
    assert address(slabs.take(BIG)) != first  # the buffer is there
    buffer.release()
    gc.collect()
    assert first in {address(one) for one in [slabs.take(BIG), slabs.take(BIG)]}


@given(st.lists(st.tuples(st.integers(1, 3 * BIG), st.booleans())))
def test_what_is_held_never_changes(steps):
    slabs, held = Slabs(), []
    for number, (nbytes, drop) in enumerate(steps):
        array = slabs.take(nbytes)
        assert len(array) == nbytes
        array[:] = number % 251
        held.append((number % 251, array[nbytes // 2 :]))
        if drop:
            held.pop(len(held) // 2)
        assert all((array == value).all() for value, array in held)


def test_slabs_that_are_too_small_make_room_and_those_in_use_stay():
    slabs = Slabs()
    used = slabs.take(BIG)
    used[:] = 7
    for size in (1, 2, 4, 8, 16, 32, 64):
        slabs.take(size << 20)
    big = [slabs.take(16 << 20) for _ in range(5)]
    assert len({address(one) for one in big}) == 5
    assert slabs._bytes == sum(map(len, slabs._slabs)) <= 64 << 20
    assert (used == 7).all()
