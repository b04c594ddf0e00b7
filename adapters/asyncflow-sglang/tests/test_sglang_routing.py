"""Which request goes where, whatever the order of events."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncflow_sglang.routing import Routing


class AnyOrder(RuleBasedStateMachine):
    """Requests, servers that open and close, ends; a model keeps what was placed."""

    @initialize(servers=st.integers(1, 4), slots=st.integers(1, 3), slack=st.integers(0, 2))
    def begin(self, servers, slots, slack):
        self.slots = slots
        self.routing = Routing(slots, slack)
        self.open = dict.fromkeys([f"s{n}" for n in range(servers)], False)
        for name in self.open:
            self.routing.add(name)
        self.waiting, self.placed, self.count = [], {}, 0

    def take(self, placements):
        for request, server in placements:
            assert request == self.waiting.pop(0), "first come, first placed"
            assert self.open[server], "only open servers get requests"
            self.placed[request] = server

    @rule(prefix=st.integers(0, 3))
    def submit(self, prefix):
        self.count += 1
        self.waiting.append(self.count)
        self.take(self.routing.submit(self.count, prefix))

    @rule(data=st.data())
    def open_or_close(self, data):
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.open[name] = not self.open[name]
        if self.open[name]:
            self.take(self.routing.open(name))
        else:
            self.routing.close(name)

    @precondition(lambda self: self.placed)
    @rule(data=st.data())
    def end(self, data):
        request = data.draw(st.sampled_from(sorted(self.placed)))
        del self.placed[request]
        self.take(self.routing.done(request))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data):
        request = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(request)
        self.take(self.routing.done(request))

    @invariant()
    def slots_hold_and_nobody_waits_beside_room(self):
        if not hasattr(self, "open"):
            return
        for name, opened in self.open.items():
            there = self.routing.running(name)
            assert there == {r for r, server in self.placed.items() if server == name}
            assert len(there) <= self.slots
            assert not (self.waiting and opened and len(there) < self.slots)
        assert self.routing.waiting == len(self.waiting)
        assert self.routing.any_open == any(self.open.values())


AnyOrder.TestCase.settings = settings(max_examples=60, deadline=None)
TestAnyOrder = AnyOrder.TestCase


@given(groups=st.lists(st.integers(0, 5), min_size=1, max_size=60), slack=st.integers(0, 5))
def test_affinity_keeps_a_prompts_requests_together_within_the_slack(groups, slack):
    routing = Routing(slots=1000, slack=slack)
    for name in ("a", "b"):
        routing.add(name)
        routing.open(name)
    loads, homes = {"a": 0, "b": 0}, {}
    for number, group in enumerate(groups):
        ((_, server),) = routing.submit(number, group)
        home = homes.get(group)
        if home is not None and loads[home] <= min(loads.values()) + slack:
            assert server == home
        else:
            assert loads[server] == min(loads.values())
        homes[group] = server
        loads[server] += 1
