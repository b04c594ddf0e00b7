"""A configuration says which ready rows go first, and a misspelt policy is named with its place."""

import sys

import pytest

from asyncflow_core.batch import GroupKey
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registry
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.testing.data_store import prompts

from .conftest import BASE, distribution


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


POLICY = """\
from asyncflow_core import hookimpl

class Last:
    window = 64

    def order(self, candidates, *, requester, holders):
        return list(reversed(candidates))

@hookimpl
def asyncflow_register(registrar):
    registrar.add("lease_policy", "last", lambda options, ctx: Last(), api_version=1)
"""


@pytest.fixture
def last(folder, tmp_path, monkeypatch):
    """A distribution with the lease policy `last`."""
    distribution(
        tmp_path / "site", "af-last", {"lease_policy.last": "af_last"}, {"af_last": POLICY}
    )
    monkeypatch.setenv("ASYNCFLOW_PLUGINS", "af-config,af-broken,af-last")
    yield
    sys.modules.pop("af_last", None)


STORE = "data_store: {plugin: memory, options: {lease_policies: [NAME]}}\n"


def test_lease_policy_of_a_plugin_is_taken_where_the_store_names_it(last, write, command):
    text = BASE.replace("  options: {slots: 4}\n", "  lease_policy: last\n")
    status, out, _ = command("doctor", write(text))
    assert status == 2
    assert "no lease policy 'last'" in out
    status, out, _ = command("doctor", write(text + STORE.replace("NAME", "last")))
    assert status == 0, out


def test_doctor_unknown_policy_of_a_store_is_named_with_the_nearest(last, write, command):
    status, out, _ = command("doctor", write(BASE + STORE.replace("NAME", "lest")))
    assert status == 2
    (fault,) = [line for line in out.splitlines() if "lease_policies" in line]
    assert "lest" in fault
    assert "'last'" in fault


async def test_store_hands_out_by_the_policy_of_a_plugin(last):
    registry = Registry()
    plugin = registry.get("data_store", "memory")
    options = plugin.parse_options({"lease_policies": ["last"]})
    made = plugin.factory(options, PartContext(registry=registry))
    assert made.capabilities.lease_policies == plugin.capabilities_for(options).lease_policies
    async with made as store:
        await store.register(TaskSpec("log", ("prompt_ids",)))
        await store.put(prompts(3), keys=[GroupKey(0, 0, number) for number in range(3)])
        lease = await store.lease("log", requester="a", limit_rows=3, policy="last")
        assert [info.key.sequence for info in lease.rows] == [2, 1, 0]
