"""Stuck is silence while we listened; restarts are bounded."""

from hypothesis import given
from hypothesis import strategies as st

from asyncflow_core.flow.processes.watchdog import Clock, Restarts, Watchdog

gaps = st.lists(st.floats(0.0, 100.0, allow_nan=False), max_size=30)


@given(gaps)
def test_clock_runs_on_and_leaves_out_stops(steps):
    time, expected = 0.0, 0.0
    clock = Clock(lambda: time, max_gap_s=5.0)
    for step in steps:
        time += step
        before, now = expected, clock.now()
        # A gap is what the source shows, in its own rounding.
        expected = time - clock.stopped_s
        assert now == expected >= before - 1e-6
        assert (step > 5.0) <= (now - before < 1e-6) or step <= 5.0
    assert clock.stopped_s <= sum(step for step in steps if step > 5.0 - 1e-6) + 1e-6


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["beat", "forget", "look"]))))
def test_stuck_is_who_was_watched_and_silent_for_long_and_is_named_once(acts):
    watchdog, seen, now = Watchdog(3.0), {}, 0.0
    for name, act in acts:
        now += 1.0
        if act == "beat":
            watchdog.beat(name, now)
            seen[name] = now
        elif act == "forget":
            watchdog.forget(name)
            seen.pop(name, None)
        else:
            expected = {n for n, at in seen.items() if now - at >= 3.0}
            assert set(watchdog.stuck(now)) == expected
            for gone in expected:
                del seen[gone]
        assert watchdog.silent_s(now) == {n: now - at for n, at in seen.items()}


@given(
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.0, 6.0, allow_nan=False)), max_size=40),
)
def test_restarts_are_at_most_the_limit_within_any_window(limit, deaths):
    restarts, now, allowed = Restarts(limit, 10.0), 0.0, []
    for name, step in deaths:
        now += step
        if not restarts.refusal(name, now):
            allowed.append((name, now))
            recent = [at for who, at in allowed if who == name and at > now - 10.0]
            assert len(recent) <= limit
        elif limit:
            assert [who for who, at in deaths].count(name) > limit
    assert restarts.total == len(allowed) == sum(restarts.count.values())


def test_deaths_of_rows_are_bounded_in_a_row_without_a_finished_one():
    restarts = Restarts(2, 600.0)

    def refusal(name, finished):
        return restarts.refusal(name, 0.0, finished=finished, of_rows=True)

    for finished in (10, 10, 11, 11):
        assert not refusal("reward-0", finished)
    assert refusal("reward-0", 11) == "2 times in a row without progress in between"
    assert not refusal("reward-1", 11)
    assert not restarts.refusal("reward-0", 0.0, finished=11)  # other deaths are counted apart


def test_deaths_too_far_apart_for_the_window_are_bounded_where_nothing_is_finished():
    restarts = Restarts(2, 600.0)
    found = [restarts.refusal("rollout-0", hour * 3600.0, finished=5) for hour in range(3)]
    assert found == ["", "", "2 times in a row without progress in between"]
    found = [restarts.refusal("rollout-1", hour * 3600.0, finished=hour) for hour in range(9)]
    assert not any(found)
