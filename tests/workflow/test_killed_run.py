"""The places at which runs are killed are places of the code."""

import pytest

from tests.workflow.killed_run import PLACES, owner_of


@pytest.mark.parametrize("name", PLACES)
def test_place_is_a_function_of_the_code(name):
    assert callable(getattr(owner_of(name), PLACES[name][2]))
