"""A configuration says which ready rows go first, and a misspelt policy is named with its place."""

import pytest

from .conftest import BASE


def test_lease_policies_of_all_sections_are_taken(write, command):
    text = BASE.replace("  options: {slots: 4}\n", "  lease_policy: stalest_first\n")
    text = text.replace("  options: {lr: 1.0}\n", "  lease_policy: token_balanced\n")
    text = text.replace(
        "{plugin: made_up}\nworkflow", "{plugin: made_up, lease_policy: fifo}\nworkflow"
    )
    assert text.count("lease_policy") == 3
    status, out, _ = command("doctor", write(text))
    assert status == 0, out


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("  options: {slots: 4}\n", "  lease_policy: stalest\n", "rollout"),
        ("  options: {lr: 1.0}\n", "  lease_policy: stalest\n", "trainer"),
        (
            "kind: reward}",
            "kind: reward, lease_policy: stalest}",
            "stages.reward",
        ),
    ],
)
def test_doctor_unknown_lease_policy_is_named_with_line_and_near_name(
    old, new, path, write, command
):
    text = BASE.replace(old, new)
    assert "stalest" in text
    written = write(text)
    status, out, _ = command("doctor", written)
    assert status == 2
    line = text[: text.index("stalest")].count("\n") + 1
    (fault,) = [line for line in out.splitlines() if "no lease policy" in line]
    assert f"{written}:{line}:" in fault
    assert f"{path}.lease_policy" in fault
    assert "did you mean 'stalest_first'?" in fault
    assert "'memory' has no lease policy 'stalest', it has fifo, stalest_first" in fault
