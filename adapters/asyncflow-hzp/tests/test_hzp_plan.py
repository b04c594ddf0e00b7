"""The pure parts: who holds what, what is used next, what a tuple costs."""

from itertools import pairwise

import pytest
from torch import nn

from asyncflow_core.errors import ConfigError
from asyncflow_hzp.layout import PRESETS, Layout, Sizes, parse_sizes, valid_sizes
from asyncflow_hzp.planner import LinkSpeeds, Workload, plan_tuples
from asyncflow_hzp.trace import Trace
from asyncflow_hzp.units import cut_units

WORLDS = [1, 2, 4, 6, 8, 12]


def inside(inner, outer):
    return outer[0] <= inner[0] and inner[1] <= outer[1]


@pytest.mark.parametrize("world", WORLDS)
def test_shards_any_valid_tuple_nest_and_cover(world):
    elements = 16 * 24 * world
    for sizes in valid_sizes(world):
        layouts = [Layout(sizes, tuple(range(world)), place) for place in range(world)]
        for layout in layouts:
            own = layout.shard(sizes.z1, elements)
            assert inside(own, layout.shard(sizes.z2, elements))
            assert inside(own, layout.shard(sizes.z3, elements))
            for outer, inner in ((sizes.z1, sizes.z2), (sizes.z1, sizes.z3), (sizes.z2, 1)):
                pieces = layout.pieces(outer, inner, elements)
                assert layout.place in [piece.rank for piece in pieces]
                stretches = sorted((piece.start, piece.stop) for piece in pieces)
                start, stop = layout.shard(inner, elements)
                assert stretches[0][0] == start
                assert stretches[-1][1] == stop
                assert all(a[1] == b[0] for a, b in pairwise(stretches))
        assert sum(layout.is_first_replica for layout in layouts) == sizes.z1


@pytest.mark.parametrize("world", WORLDS)
def test_presets_are_valid_tuples(world):
    for name in PRESETS:
        assert parse_sizes(name, world=world, node=world) in list(valid_sizes(world))


@pytest.mark.parametrize(
    "sizes", [(3, 1, 3), (2, 1, 1), (0, 1, 2), (2, 2), (4, 2, 4, 4), "zero4", 2.0]
)
def test_sizes_misfit_refused(sizes):
    with pytest.raises(ConfigError):
        parse_sizes(sizes, world=4, node=2)


def walk(trace, forward, backward, grad=True):
    for unit in forward:
        trace.use(unit, backward=False, caller=unit, grad=grad)
    for unit in backward:
        trace.use(unit, backward=True, caller=None)
    if backward:
        trace.end_backward()


def test_trace_second_pass_foretells_the_first():
    trace = Trace()
    walk(trace, [0, 1, 2], [2, 1])
    trace.use(0, backward=False, caller=0)
    assert list(trace.upcoming()) == [1, 2, 2, 1, 0, 1, 2]
    walk(trace, [1, 2], [2, 1])
    assert list(trace.upcoming()) == [0, 1, 2]


def test_trace_forward_alone_repeated_begins_again():
    trace = Trace()
    walk(trace, [0, 1, 2], [])
    trace.use(0, backward=False, caller=0, grad=False)
    assert list(trace.upcoming()) == [1, 2, 0, 1, 2]


def test_trace_other_way_is_followed_and_learned():
    trace = Trace()
    walk(trace, [0, 1, 2, 3], [3, 2, 1])
    walk(trace, [0, 2, 3], [3, 2])
    trace.use(0, backward=False, caller=0)
    assert list(trace.upcoming())[:3] == [2, 3, 3]


def test_plan_memory_and_bytes_are_those_of_the_formulas():
    psi = 4800
    work = Workload(elements=(psi,), slots=1, grad_buffers=1)
    plan = plan_tuples(work, world=4, node_size=2)
    rows = {row.sizes: row for row in plan.rows}
    ddp = rows[Sizes(1, 1, 1)]
    assert ddp.memory_bytes == (2 + 4 + 12) * psi
    assert ddp.intra_bytes + ddp.inter_bytes == 2 * 4 * psi * 3 // 4
    full = rows[Sizes(4, 4, 4)]
    buffers = 2 * psi + 2 * 4 * psi
    assert full.memory_bytes == (2 + 4 + 12) * psi // 4 + buffers
    assert full.intra_bytes + full.inter_bytes == (2 * 2 + 4) * psi * 3 // 4
    node = rows[Sizes(2, 2, 4)]
    # Parameters and most of the gradient stay on the node.
    assert node.inter_bytes == (4 + 2) * psi // 4


def test_plan_tight_budget_shards_more():
    work = Workload(elements=(1000,) * 8, slots=2, grad_buffers=1)
    wide = plan_tuples(work, world=4, node_size=4)
    tight = plan_tuples(work, world=4, node_size=4, memory_bytes=50_000)
    assert wide.best.sizes.z3 < tight.best.sizes.z3
    assert "over budget" in str(tight)
    with pytest.raises(ConfigError, match="no sharding fits"):
        _ = plan_tuples(work, world=4, node_size=4, memory_bytes=100).best


def test_plan_slow_network_keeps_frequent_traffic_on_the_node():
    work = Workload(elements=(10**6,) * 8, micro_batches=4, accumulate_full=False)
    speeds = LinkSpeeds(intra_bytes_s=100e9, inter_bytes_s=1e9)
    plan = plan_tuples(work, world=8, node_size=4, speeds=speeds, memory_bytes=60_000_000)
    assert plan.best.sizes.z3 <= 4
    assert plan.best.sizes.z2 <= 4


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)


class _Tower(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(5000, 4)
        self.layers = nn.ModuleList(_Layer() for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5000, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_units_small_leftovers_travel_with_the_next():
    cuts = cut_units(_Tower(tied=False), _Layer)
    assert [cut.name for cut in cuts] == ["embed", "layers.0", "layers.1", "head"]
    assert [name for name, _ in cuts[-1].named] == ["head.weight", "norm.weight", "norm.bias"]
    assert len(cuts[-1].modules) == 2


def test_units_tied_parameter_belongs_to_one_unit_two_modules():
    tower = _Tower(tied=True)
    cuts = cut_units(tower, _Layer)
    assert [cut.name for cut in cuts] == ["embed", "layers.0", "layers.1"]
    assert tower.head in cuts[0].modules
    assert "norm.weight" in [name for name, _ in cuts[0].named]


def test_units_frozen_and_trainable_are_apart():
    tower = _Tower(tied=False)
    tower.layers[0].lin.requires_grad_(False)
    cuts = cut_units(tower, lambda name, module: isinstance(module, _Layer))
    assert [cut.name for cut in cuts[1:3]] == ["layers.0", "layers.0[1]"]
    assert cuts[1].modules == cuts[2].modules == [tower.layers[0]]


def test_units_no_such_class_refused():
    with pytest.raises(ConfigError, match="no module"):
        cut_units(_Tower(tied=False), nn.Conv2d)
