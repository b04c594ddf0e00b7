"""Counting seconds and tokens, and naming the bottleneck."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow_core.config import RunConfig
from asyncflow_core.errors import DataError
from asyncflow_core.flow.running.status import (
    Bottleneck,
    Counters,
    Shares,
    Staleness,
    Status,
    Tokens,
    WorkerStatus,
    bottleneck,
)
from asyncflow_core.flow.running.totals import Totals
from asyncflow_core.flow.running.watching import Watching
from asyncflow_core.flow.working.busy import Busy
from asyncflow_core.services.data_store import StoreStats, TaskStats


def test_busy_overlapping_blocks_count_once_and_open_ones_until_now():
    now = 0.0
    busy = Busy(lambda: now)
    assert busy.seconds == 0
    with busy:
        now = 1.0
        with busy:
            now = 3.0
        now = 4.0
        assert busy.seconds == 4.0
    now = 10.0
    assert busy.seconds == 4.0
    with pytest.raises(ZeroDivisionError), busy:  # noqa: PT012
        now = 12.0
        _ = 1 / 0
    assert busy.seconds == 6.0


def test_shares_look_back_over_the_window_only():
    shares = Shares(window_s=10.0)
    assert shares.add("w", 0.0, 0.0, 0.0) == (0.0, 0.0)
    assert shares.add("w", 5.0, 5.0, 0.0) == (1.0, 0.0)
    for now in range(6, 31):  # from 5 s on it waits
        found = shares.add("w", float(now), 5.0, now - 5.0)
    assert found == (0.0, 1.0)
    assert shares.add("other", 30.0, 3.0, 3.0) == (0.0, 0.0)


def test_shares_of_a_worker_started_again_leave_out_what_was_before():
    shares = Shares()
    shares.add("w", 0.0, 100.0, 50.0)
    shares.add("w", 1.0, 101.0, 50.0)
    assert shares.add("w", 2.0, 0.0, 0.0) == (0.0, 0.0)
    assert shares.add("w", 4.0, 1.0, 0.5) == (0.5, 0.25)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.booleans())),
)
def test_counters_total_is_all_that_was_ever_counted(events):
    counters, now, total = Counters(), dict.fromkeys("abc", 0), 0
    for name, more, again in events:
        if again:  # it died; it may count further than before until it is seen again
            now[name] = 0
            counters.left(name)
        now[name] += more
        total += more
        counters.set(name, now[name])
    assert counters.total == total


def test_tokens_elsewhere_are_those_on_their_way():
    tokens = Tokens(generated=100, trained=60, evaluated=10, wasted={"died": 5, "straggler": 1})
    assert tokens.elsewhere == 24


def test_staleness_adds_up_and_keeps_the_last_versions():
    staleness = Staleness(bound=2)
    for version in range(1, 41):
        staleness.add(version, {2: 1, 0: 3})
    assert staleness.rows == {0: 120, 2: 40}
    assert [version for version, _ in staleness.last] == list(range(29, 41))


def workers(*, train=(0.5, 0.5), rollout=0.5, reward=0.1):
    return [
        WorkerStatus("trainer-0", "train", *train),
        WorkerStatus("rollout-0", "rollout", rollout),
        WorkerStatus("rollout-1", "rollout", rollout),
        WorkerStatus("reward-0", "reward", reward),
        WorkerStatus("recorder", "record", 1.0),
    ]


@pytest.mark.parametrize(
    ("shares", "what", "words", "knob"),
    [
        ({"train": (0.97, 0.01)}, "trainer", "trainer busy 97%: the trainer is", "world_size"),
        ({"train": (0.8, 0.05)}, "trainer", "rollout is busy 50%", "micro_batch_tokens"),
        (
            {"train": (0.5, 0.4), "rollout": 0.96},
            "rollout",
            "trainer waits for rows 40% of the time, rollout is busy 96%: rollout is",
            "rollout.replicas",
        ),
        (
            {"train": (0.5, 0.4), "reward": 0.99},
            "reward",
            "stage reward is busy 99%",
            "stages.reward.workers",
        ),
        (
            {"train": (0.5, 0.4), "rollout": 0.6},
            "bound",
            "rollout is busy only 60%: batches wait for their longest",
            "workflow.max_staleness: 2",
        ),
        ({"train": (0.1, 0.3)}, "between", "trainer busy 10%, waits for rows 30%", "groups_per_"),
        ({"train": (0.45, 0.45)}, "bound", "trainer waits", "workflow.max_staleness: 2"),
    ],
)
def test_bottleneck_names_the_part_and_the_knob(shares, what, words, knob):
    found = bottleneck(workers(**shares), StoreStats(), bound=1, preset="async")
    assert found.what == what
    assert words in found.words
    assert any(knob in line for line in found.knobs) or not knob


def test_bottleneck_rollout_on_policy_advises_to_overlap_first():
    found = bottleneck(
        workers(train=(0.4, 0.6), rollout=0.9), StoreStats(), bound=0, preset="sequential"
    )
    assert found.knobs[0].startswith("workflow.max_staleness")


def test_bottleneck_full_store_comes_before_everything():
    full = StoreStats(waiting_puts=1, capacity_bytes=1 << 30, reserved_bytes=1 << 30)
    assert bottleneck(workers(train=(0.99, 0.0)), full, bound=1, preset="async").what == "store"


def test_bottleneck_without_a_trainer_or_a_cause_is_unknown():
    assert bottleneck([], StoreStats(), bound=1, preset="async") == Bottleneck()
    evenly = workers(train=(0.72, 0.08), rollout=0.9)
    assert bottleneck(evenly, StoreStats(), bound=1, preset="async").what == "trainer"


STATUS = Status(
    run="r",
    preset="async",
    state="running",
    pid=7,
    host="here",
    time=1000.0,
    elapsed_s=75.0,
    every_s=1.0,
    version=3,
    steps=9,
    step_wall_s=1.5,
    tokens_per_s=12345.0,
    reward=0.25,
    scores=[(0, 0.1), (2, 0.3)],
    workers=workers(),
    store=StoreStats(
        rows=5,
        bytes=3 << 20,
        capacity_bytes=4 << 20,
        reserved_bytes=1 << 20,
        rows_dropped={"refused by the engine": 2},
        tasks={"rollout": TaskStats(ready=1, leased=4, committed=9, holders={"rollout-0": 4})},
    ),
    staleness=Staleness(1, {0: 8, 1: 24}, [(1, {0: 8}), (2, {1: 12}), (3, {1: 12})]),
    tokens=Tokens(generated=1000, trained=800, evaluated=50, kept=7, wasted={"switch": 150}),
    waits=["step 4 waits since 2 s"],
    bottleneck=Bottleneck("trainer", "trainer busy 97%: " + "long words " * 20, ("a.b: more",)),
)


def test_status_json_comes_back_equal():
    assert Status.from_json(STATUS.to_json()) == STATUS


def test_status_of_another_release_is_refused():
    with pytest.raises(DataError, match="not the status of a run as this release"):
        Status.from_json(b'{"run": "r"}')


def test_status_is_of_one_moment(tmp_path):
    config = RunConfig(
        **{section: {"plugin": "any"} for section in ("prompts", "rollout", "trainer", "loss")},
        stages={},
        workflow={"steps": 1, "groups_per_step": 1, "group_size": 2},
    )
    totals = Totals()
    watching = Watching(config, tmp_path, totals, {})
    totals.staleness.add(1, {0: 16})
    status = watching.status("running")
    totals.staleness.add(2, {0: 8, 1: 8})  # while a thread writes the first
    assert status.staleness == Staleness(0, {0: 16}, [(1, {0: 16})])
    assert watching.status("running").staleness.rows == {0: 24, 1: 8}
