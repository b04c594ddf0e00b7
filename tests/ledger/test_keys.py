"""Which groups were ever put: as a set of them would say, in memory that follows the gaps."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from asyncflow_core.batch import GroupKey
from asyncflow_core.ledger.keys import KnownKeys

RUNS = st.tuples(st.integers(0, 30), st.integers(0, 8))


def unknown(known, first, count):
    return list(known.unknown_in(GroupKey(0, 0, first), count))


@given(st.lists(RUNS), RUNS)
def test_knows_what_a_set_of_all_knows(added, asked):
    known, every = KnownKeys(), set()
    for first, count in added:
        known.add(GroupKey(0, 0, first), count)
        every.update(range(first, first + count))
    first, count = asked
    found = unknown(known, first, count)
    covered = [sequence for start, end in found for sequence in range(start, end)]
    assert covered == [n for n in range(first, first + count) if n not in every]
    assert all(start < end for start, end in found)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(found))
    assert (GroupKey(0, 0, first) in known) == (first in every)
    again = KnownKeys()
    again.load(known.dump())
    assert unknown(again, 0, 50) == unknown(known, 0, 50)


@given(st.permutations(range(8)), st.integers(0, 1 << 40))
def test_runs_become_one_when_their_gaps_are_filled(order, origin):
    known = KnownKeys()
    for number in order:
        known.add(GroupKey(3, 1, origin + 5 * number), 5)
    assert known.dump() == [(3, 1, [origin], [origin + 40])]


def test_sources_and_epochs_are_apart_and_nothing_is_nothing():
    known = KnownKeys()
    assert known.add(GroupKey(1, 2, 3), 0) == (1, 2)
    assert GroupKey(1, 2, 3) not in known
    known.add(GroupKey(1, 2, 3), 1)
    assert GroupKey(1, 2, 3) in known
    assert GroupKey(1, 3, 3) not in known
    assert GroupKey(2, 2, 3) not in known
