"""The processes of the fault tests answer whole controls, so that no test waits for a dead one."""

import pytest

from tests.weights.process import Faults, Replica, Trainer


@pytest.mark.parametrize("role", [Trainer, Replica])
def test_role_answers_every_call_of_its_control(role):
    assert not role.__abstractmethods__
    assert role(None, Faults())
