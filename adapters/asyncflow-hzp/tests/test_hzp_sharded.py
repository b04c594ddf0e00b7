"""A sharded model trains as one process does, at every tuple. `slow` covers all of them."""

import pytest
import torch
from library_models import (
    UNITS,
    Case,
    expected_run,
    loss_of,
    make_net,
    make_sharded,
    train,
    weights_of,
)
from library_programs import check_random_programs
from library_ranks import (
    DENSE,
    MOE,
    check_all,
    check_delays,
    check_each,
    check_resume_smaller,
    check_save,
    start,
)
from torch import nn

import asyncflow_hzp as hzp
from asyncflow_core.errors import ConfigError, ServiceError
from asyncflow_hzp.layout import Sizes

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize("case", [*DENSE, MOE[0]], ids=str)
def test_one_rank_any_case_trains_as_plain(case):
    expected, _ = expected_run(1, case)
    model, optimizer = make_sharded(case, Sizes(1, 1, 1))
    train(model, optimizer, case, range(2))
    found = weights_of(model)
    model.close()
    for name, tensor in expected.items():
        worst = float((found[name] - tensor).abs().max())
        assert worst <= (0.0 if case == Case() else 2e-3 if case.low else 2e-6), name


def test_two_ranks_train_as_plain_resume_and_fail_by_name(tmp_path):
    """In one start: what is quick of the checks in `library_ranks`."""
    some = [((2, 2, 2), case) for case in (*DENSE, MOE[1])]
    checks = [
        ("check_some", ([*some, ((1, 1, 2), DENSE[0]), ((1, 1, 1), DENSE[2])],)),
        ("check_idle", ()),
        ("check_meta", ()),
        ("check_traffic", ((2, 2, 2), 3, 2.0)),
        ("check_resume", (str(tmp_path / "a"), (2, 2, 2), (1, 1, 2))),
        ("check_resume_experts", (str(tmp_path / "e"), (2, 2, 2), (1, 2, 2))),
        ("check_mismatch", ()),
        ("check_zero", ()),
        ("check_lost_file", (str(tmp_path / "lost" / "one"),)),
        ("check_load_frozen", (str(tmp_path / "frozen"),)),
        ("check_failed_backward", ()),
        ("check_returned_parameter", ()),
        ("check_error", ()),
    ]
    start(check_each, 2, checks)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_all_tuples_dense_and_moe_train_as_plain(world):
    start(check_all, world, [*DENSE, *MOE])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "seeds"), [(2, range(40)), (4, range(20))], ids=str)
def test_random_programs_train_as_plain(world, seeds):
    start(check_random_programs, world, seeds)


@pytest.mark.slow
def test_random_delays_hundred_steps_end_with_equal_weights():
    start(check_delays, 4, 100)


@pytest.mark.slow
def test_resume_other_world_size_goes_on(tmp_path):
    start(check_save, 4, str(tmp_path / "a"), (2, 4, 4))
    start(check_resume_smaller, 2, str(tmp_path / "a"), (2, 2, 2), 4)


def test_second_last_backward_of_a_step_refused():
    case = Case()
    model, optimizer = make_sharded(case, Sizes(1, 1, 1))
    loss_of(model, 0, 0, 0).backward()
    with pytest.raises(ServiceError, match="no_sync"):
        loss_of(model, 0, 1, 0).backward()
    optimizer.zero_grad()
    train(model, optimizer, case, range(1))
    model.close()


def test_parameter_unused_in_the_first_micro_batch_counts_zero_there():
    model, optimizer = make_sharded(Case(), Sizes(1, 1, 1))
    train(model, optimizer, Case(), range(1))  # leaves values in the gradients' memory
    net = model.module
    with model.no_sync():
        net.head(net.norm(net.embed(torch.zeros(1, 3, dtype=torch.int64)))).sum().backward()
    loss_of(model, 0, 0, 1).backward()
    found = model.reduction
    found.finish()
    unit = next(unit for unit in model.units if unit.name == "layers.0")
    grad = found.wait(unit).clone()
    optimizer.zero_grad()
    loss_of(model, 0, 0, 1).backward()
    found.finish()
    assert torch.equal(found.wait(unit), grad)
    model.close()


def test_norm_of_a_large_gradient_is_exact_to_six_digits():
    model = hzp.shard(nn.Linear(2048, 2048, bias=False))
    optimizer = hzp.Optimizer(model, torch.optim.SGD, lr=1.0)
    model(torch.full((1, 2048), 0.1)).sum().backward()  # float32 alone would be 0.3% off
    assert optimizer.grad_norm() == pytest.approx(0.1 * 2048, rel=1e-6)
    model.close()


def test_muon_for_matrices_updates_as_torch_does():
    net = make_net(Case())
    plain = {name: param.detach().clone() for name, param in net.named_parameters()}
    loss_of(net, 0, 0, 0).backward()
    matrices = [net.layers[n].up.weight for n in range(3)]
    torch.optim.Muon(matrices, lr=0.02).step()
    expected = net.layers[1].up.weight.detach().clone()
    model = hzp.shard(make_net(Case()), hzp.Config(units=UNITS))
    optimizer = hzp.Optimizer(
        model,
        torch.optim.SGD,
        groups={"matrices": {"kind": torch.optim.Muon, "whole": True, "lr": 0.02}},
        group_of=lambda name, _: "matrices" if name.endswith("up.weight") else "default",
        lr=0.0,
    )
    train(model, optimizer, Case(), range(1))
    found = weights_of(model)
    model.close()
    assert torch.equal(found["layers.1.up.weight"], expected)
    assert torch.equal(found["head.weight"], plain["head.weight"])


def test_two_kinds_of_optimizer_resume_as_one_run(tmp_path):
    def begin():
        model = hzp.shard(make_net(Case()), hzp.Config(units=UNITS))
        optimizer = hzp.Optimizer(
            model,
            torch.optim.AdamW,
            groups={"matrices": {"kind": torch.optim.Muon, "whole": True, "lr": 0.02}},
            group_of=lambda name, _: "matrices" if name.endswith("up.weight") else "default",
            lr=1e-3,
        )
        return model, optimizer

    straight, other = begin(), begin()
    train(*straight, Case(), range(1))
    record = hzp.save_state(tmp_path, *straight)
    train(*straight, Case(), range(1, 3))
    train(*other, Case(), [7])
    hzp.load_state(tmp_path, *other, record)
    train(*other, Case(), range(1, 3))
    expected, found = weights_of(straight[0]), weights_of(other[0])
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for model, _ in (straight, other):
        model.close()


def test_optimizer_with_state_of_another_shape_is_refused_before_anything_is_saved(tmp_path):
    model = hzp.shard(make_net(Case()), hzp.Config(units=UNITS))
    optimizer = hzp.Optimizer(
        model,
        torch.optim.SGD,
        groups={"matrices": {"kind": torch.optim.Adafactor, "whole": True, "lr": 0.02}},
        group_of=lambda name, _: "matrices" if name.endswith("up.weight") else "default",
        lr=1e-3,
    )
    train(model, optimizer, Case(), range(1))
    with pytest.raises(ConfigError, match=r"'row_var' of 'layers.0.up.weight' has the shape"):
        hzp.save_state(tmp_path, model, optimizer)
    assert not list(tmp_path.iterdir())
    model.close()


@pytest.mark.parametrize(("fused", "where"), [(True, "meta"), (False, "cpu")])
def test_a_loaded_step_count_lies_where_the_optimizer_wants_it(fused, where):
    model = hzp.shard(make_net(Case()), hzp.Config(units=UNITS))
    optimizer = hzp.Optimizer(model, torch.optim.AdamW, lr=1e-3, fused=fused)
    piece = nn.Parameter(torch.zeros(2, device="meta"))
    assert optimizer.number(3.0, piece, "default").device.type == where
    model.close()


def test_group_that_is_not_there_refused():
    model = hzp.shard(make_net(Case()), hzp.Config(units=UNITS))
    with pytest.raises(ConfigError, match=r"the group 'plian'; groups are default, plain"):
        hzp.Optimizer(
            model, torch.optim.SGD, groups={"plain": {}}, group_of=lambda *_: "plian", lr=1.0
        )
    model.close()


class Scaled(nn.Module):
    """No parameter of its own; a buffer that is saved and one that is not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.empty(4))
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.register_buffer("cache", torch.empty(2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        for buffer in self.buffers():
            buffer.fill_(2)

    def forward(self, x):
        self.count += 1
        return x * self.scale


def test_buffers_are_made_saved_and_loaded(tmp_path):
    with torch.device("meta"):
        net = nn.Sequential(Scaled(), nn.Linear(4, 4))
    model = hzp.shard(net)
    assert model(torch.ones(1, 4)).isfinite().all()
    net[0].scale.fill_(3.0)
    record = hzp.save_state(tmp_path, model, None)
    for buffer in net.buffers():
        buffer.zero_()
    hzp.load_state(tmp_path, model, None, record)
    model.close()
    assert net[0].scale.tolist() == [3.0] * 4
    assert int(net[0].count) == 3
    assert net[0].cache.tolist() == [0.0] * 2


def test_sizes_that_do_not_fit_refused():
    with pytest.raises(ConfigError, match="must divide"):
        make_sharded(Case(), (2, 2, 2))
    with pytest.raises(ConfigError, match="no sharding 'zero9'"):
        make_sharded(Case(), "zero9")
