"""Which batch a prompt group goes to, whatever order versions and drops come in."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow_core.errors import InvariantError
from asyncflow_core.flow.running.admission import Admission

settings_of_a_run = st.fixed_dictionaries(
    {
        "groups_per_step": st.integers(1, 5),
        "steps": st.integers(1, 7),
        "max_staleness": st.integers(0, 3),
    }
)


def admit(admission):
    """All groups that may start now."""
    found = []
    while (batch := admission.next()) is not None:
        found.append(batch)
        assert len(found) < 1000
    return found


@given(settings_of_a_run, st.data())
def test_admission_any_drops_fills_every_batch_in_time(run, data):
    admission = Admission(**run)
    living = Counter()
    order = []
    for version in range(run["steps"]):
        admitted = admit(admission)
        order += admitted
        living.update(admitted)
        assert all(b <= version + run["max_staleness"] for b in admitted)
        for _ in range(data.draw(st.integers(0, 6))):
            # A group of an admitted, untrained batch is dropped: its own batch gets the next one.
            batch = data.draw(st.sampled_from([b for b in living if b >= version]))
            if not living[batch]:
                continue
            living[batch] -= 1
            admission.replace(batch)
            if data.draw(st.booleans()):
                living[admission.next()] += 1
        living.update(admit(admission))
        assert living[version] == run["groups_per_step"]
        admission.advance(version + 1)
    assert living == dict.fromkeys(range(run["steps"]), run["groups_per_step"])
    assert order == sorted(order)
    assert admission.next() is None


@given(settings_of_a_run)
def test_admission_without_drops_gives_group_i_to_batch_i_over_size(run):
    admission, given_out = Admission(**run), []
    for version in range(run["steps"]):
        given_out += admit(admission)
        assert len(given_out) == run["groups_per_step"] * min(
            run["steps"], version + run["max_staleness"] + 1
        )
        admission.advance(version + 1)
    assert given_out == [i // run["groups_per_step"] for i in range(len(given_out))]


def test_admission_of_resumed_run_starts_at_its_version():
    admission = Admission(groups_per_step=2, steps=5, max_staleness=1, version=3)
    assert admit(admission) == [3, 3, 4, 4]


@pytest.mark.parametrize("version", [0, 2, -1])
def test_advance_not_one_further_raises(version):
    admission = Admission(groups_per_step=1, steps=3, max_staleness=0)
    with pytest.raises(InvariantError, match=f"goes from 0 to {version}, not one further"):
        admission.advance(version)


def test_replace_in_batch_that_is_not_open_raises():
    admission = Admission(groups_per_step=2, steps=4, max_staleness=0)
    with pytest.raises(InvariantError, match="batch 0 was dropped"):
        admission.replace(0)  # nothing of it was admitted
    assert admit(admission) == [0, 0]
    with pytest.raises(InvariantError, match=r"batch 1 was dropped, but .* are \[0\]"):
        admission.replace(1)  # the next one, not begun: it would come before its version
    admission.advance(1)
    with pytest.raises(InvariantError, match="batch 0 was dropped"):
        admission.replace(0)  # trained
    assert admission.next() == 1
    admission.replace(1)  # begun: one of one
    assert admit(admission) == [1, 1]
