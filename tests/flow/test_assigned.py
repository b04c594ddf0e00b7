"""Which group went to which batch, over any number of lives."""

import json

from hypothesis import given
from hypothesis import strategies as st

from asyncflow_core.batch import GroupKey
from asyncflow_core.flow.running.assigned import TRAINING, Assigned, dropped_record, groups_record


def key(sequence):
    return GroupKey(TRAINING, 0, sequence)


def assign(batch, *sequences):
    return groups_record(
        batch, [key(s) for s in sequences], (0, sequences[-1] + 1), f"f{sequences[-1]}"
    )


def made_of(records):
    assigned = Assigned()
    for record in records:
        assigned.apply(json.loads(json.dumps(record)))
    return assigned


def test_assigned_knows_living_groups_the_next_prompt_and_how_many_there_were():
    assigned = made_of([assign(0, 0, 1), assign(1, 2, 3), dropped_record(1, [key(2)])])
    assert assigned.living(0) == [key(0), key(1)]
    assert assigned.living(1) == [key(3)]
    assert assigned.living(7) == []
    assert (assigned.next, assigned.last, assigned.groups) == ((0, 4), "f3", 4)
    assigned.close(1)
    assert assigned.batches() == [1]
    assert (assigned.closed, assigned.groups) == (2, 4)


@st.composite
def histories(draw):
    """Records as a run makes them: prompts in order, drops of living groups."""
    records, living, following = [], [], 0
    for _ in range(draw(st.integers(1, 12))):
        if living and draw(st.booleans()):
            batch, sequence = living.pop(draw(st.integers(0, len(living) - 1)))
            records.append(dropped_record(batch, [key(sequence)]))
        else:
            batch, count = draw(st.integers(0, 3)), draw(st.integers(1, 3))
            new = range(following, following + count)
            records.append(assign(batch, *new))
            living += [(batch, sequence) for sequence in new]
            following += count
    return records


@given(histories(), st.data())
def test_assigned_a_checkpoint_and_the_records_after_it_may_overlap(records, data):
    whole = made_of(records)
    at = data.draw(st.integers(0, len(records)))
    again = data.draw(st.integers(0, at))
    resumed = Assigned.load(json.loads(json.dumps(made_of(records[:at]).dump())))
    for record in records[again:]:
        resumed.apply(record)
    assert resumed.dump() == whole.dump()
