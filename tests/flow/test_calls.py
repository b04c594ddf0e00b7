"""Rows that a process did not outlive are found, called alone, and given up."""

import pytest

from asyncflow_core.batch import Key
from asyncflow_core.flow.working.calls import ATTEMPTS, CallLog
from asyncflow_core.services.data_store import RowInfo


def rows(*sequences, samples=1):
    keys = [Key(0, 0, sequence, sample) for sequence in sequences for sample in range(samples)]
    return [RowInfo(number, key) for number, key in enumerate(keys)]


@pytest.fixture
def log(tmp_path):
    return CallLog.of(tmp_path, "reward")


def test_calls_that_return_leave_no_suspect(log, tmp_path):
    log.begin("reward-0", rows(1, 2))
    log.end("reward-0")
    assert not log.hung("reward-0")
    assert not log.suspects()
    assert list(log.parts(rows(1, 2), whole_groups=False)) == [[0, 1]]


def test_rows_of_a_call_that_ended_the_process_are_called_alone_by_every_process(log, tmp_path):
    log.begin("reward-0", rows(1, 2))
    log.begin("reward-1", rows(5))
    assert log.hung("reward-0")
    assert not log.hung("reward-0")
    other = CallLog.of(tmp_path, "reward")
    assert list(other.parts(rows(1, 3, 2, 4), whole_groups=False)) == [[1, 3], [0], [2]]
    assert not other.given_up(rows(1)[0])
    assert CallLog.of(tmp_path, "other").suspects() == {}


def test_suspects_stay_with_their_group_where_groups_are_whole(log):
    log.begin("adv-0", rows(1, samples=2))
    log.hung("adv-0")
    found = list(log.parts(rows(0, 1, 2, samples=2), whole_groups=True))
    assert found == [[0, 1, 4, 5], [2, 3]]


def test_row_is_given_up_after_so_many_calls(log):
    for attempt in range(ATTEMPTS):
        log.suspects()
        assert not log.given_up(rows(7)[0]), attempt
        log.begin("reward-0", rows(7))
        assert log.hung("reward-0")
    log.suspects()
    assert log.given_up(rows(7)[0])


def test_process_that_gives_up_itself_is_found_to_have_hung_once(log):
    log.begin("reward-0", rows(7))
    log.give_up("reward-0")
    assert log.suspects() == {Key(0, 0, 7, 0): 1}
    assert log.hung("reward-0")
    assert not log.hung("reward-0")
    assert log.suspects() == {Key(0, 0, 7, 0): 1}
