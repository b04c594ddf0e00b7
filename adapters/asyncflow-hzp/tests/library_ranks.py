"""What ranks of a real process group check; started by the tests of the library."""

import json
import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from library_models import (
    DIM,
    STEPS,
    UNITS,
    Case,
    expected_run,
    loss_of,
    make_net,
    make_sharded,
    train,
    weights_of,
)
from safetensors.torch import load_file, save_file
from torch import distributed, multiprocessing

import asyncflow_hzp as hzp
from asyncflow_core.errors import ConfigError, DataError, EngineError, ServiceError
from asyncflow_hzp.exchange import Exchange
from asyncflow_hzp.layout import valid_sizes

DENSE = [
    Case(),
    Case(lanes=False, micro_batches=3, clip=0.5, optimizer="adamw", tied=True),
    Case(micro_batches=3, accumulate="shard", checkpoint=True, frozen=True, clip=0.5),
    Case(micro_batches=3, checkpoint=True, tied=True, optimizer="adamw", slots=2),
    Case(low=True, frozen=True, slots=9),
]
MOE = [Case(experts=1), Case(experts=2, micro_batches=3, clip=0.5, checkpoint=True)]


def start(check, world, *args):
    """Run `check(rank, world, *args)` on that many ranks; a failure fails here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(_join, (world, port, check, args), nprocs=world)


def _join(rank, world, port, check, args):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE="2")
    distributed.init_process_group("gloo", rank=rank, world_size=world)
    try:
        check(rank, world, *args)
        left = [t.name for t in threading.enumerate() if t.name.startswith("hzp-")]
        assert not left, left
    finally:
        distributed.destroy_process_group()


def one_sum(sizes, world):
    """Whether all ranks' gradients are added up one after another, as one process does.

    They are not where groups are summed first, or the ranks of a node (of 2) before the others'.
    """
    return world <= 2


def check_case(rank, world, sizes, case):
    expected, norms = expected_run(world, case)
    model, optimizer = make_sharded(case, sizes)
    found_norms = train(model, optimizer, case, range(STEPS))
    found = weights_of(model)
    model.close()
    where = f"{sizes} {case} rank {rank}"
    if case.clip:
        for norm, plain in zip(found_norms, norms, strict=True):
            assert abs(norm - plain) < 1e-4 * plain, (where, norm, plain)
    exact = case == Case() and one_sum(sizes, world)
    tolerance = 2e-3 if case.low else 2e-6
    # An expert-parallel rank has its own experts only.
    for name in set(found) & set(expected):
        worst = float((found[name] - expected[name]).abs().max())
        assert worst <= (0.0 if exact else tolerance), (where, name, worst)
    if case.experts < 2:
        assert set(expected) <= set(found)


def check_all(rank, world, cases):
    for sizes in valid_sizes(world):
        for case in cases:
            check_case(rank, world, sizes, case)


def check_each(rank, world, checks):
    """Several checks in one start: (name, arguments)."""
    for name, args in checks:
        globals()[name](rank, world, *args)


def check_some(rank, world, chosen):
    for sizes, case in chosen:
        check_case(rank, world, hzp.Sizes(*sizes), case)


def save(rank, world, path, sizes, case):
    """Train two steps and save, then two more; leaves the weights of both."""
    model, optimizer = make_sharded(case, sizes)
    train(model, optimizer, case, range(2))
    path = Path(path)
    path.mkdir(exist_ok=True)
    record = hzp.save_state(path, model, optimizer)
    distributed.barrier()
    train(model, optimizer, case, range(2, 4))
    weights = weights_of(model)
    model.close()
    if rank == 0:
        save_file(weights, path / "expected.safetensors")
        (path / "record.json").write_text(json.dumps(record))
    distributed.barrier()


def resume(rank, world, path, sizes, case, *, batches_of, exact):
    """Load, train two steps with the batches of `batches_of` ranks, compare."""
    path = Path(path)
    model, optimizer = make_sharded(case, sizes)
    train(model, optimizer, case, [7])
    record = json.loads((path / "record.json").read_text())
    hzp.load_state(path, model, optimizer, record)
    per_rank = batches_of // world
    for step in range(2, 4):
        for micro in range(per_rank):
            last = micro == per_rank - 1
            model.reduction.last = last
            # Rank r of the smaller world stands for ranks r * per_rank and following.
            (loss_of(model, rank * per_rank + micro, 0, step) / per_rank).backward()
        optimizer.step()
    found, expected = weights_of(model), load_file(path / "expected.safetensors")
    model.close()
    assert set(expected) == set(found) or case.experts
    for name in set(expected) & set(found):
        worst = float((found[name] - expected[name]).abs().max())
        assert worst <= (0.0 if exact else 2e-6), (name, worst)


def check_resume(rank, world, path, first, second):
    case = Case(optimizer="adamw")
    save(rank, world, path, first, case)
    resume(rank, world, path, second, case, batches_of=world, exact=True)


def check_resume_experts(rank, world, path, first, second):
    """A checkpoint of experts spread over some ranks goes on with another spread."""
    for number, parts in enumerate(((2, 1), (1, 2))):
        cases = [Case(optimizer="adamw", experts=experts) for experts in parts]
        save(rank, world, f"{path}{number}", first, cases[0])
        resume(rank, world, f"{path}{number}", second, cases[1], batches_of=world, exact=False)


def check_resume_smaller(rank, world, path, sizes, before):
    resume(rank, world, path, sizes, Case(optimizer="adamw"), batches_of=before, exact=False)


def check_save(rank, world, path, sizes):
    save(rank, world, path, sizes, Case(optimizer="adamw"))


def check_delays(rank, world, steps):
    """Every exchange and every unit waits a random while, other on each rank."""
    chance = random.Random(rank)
    swap = Exchange._swap

    def slow(self, sends, receives):
        time.sleep(chance.random() * 0.002)
        swap(self, sends, receives)

    Exchange._swap = slow
    case = Case(optimizer="adamw", micro_batches=2, accumulate="shard")
    model, optimizer = make_sharded(case, (2, 4, 4), timeout_s=60)  # a deadlock ends in words
    for block in model.module.layers:
        block.register_forward_pre_hook(lambda *_: time.sleep(chance.random() * 0.002))
    for _ in range(steps // 2):
        train(model, optimizer, case, range(2))
    assert same_on_all(weights_of(model), world)
    model.close()


def same_on_all(weights, world):
    digest = torch.stack([tensor.double().sum() for tensor in weights.values()])
    found = [torch.empty_like(digest) for _ in range(world)]
    distributed.all_gather(found, digest)
    return all(torch.equal(one, digest) for one in found)


def check_idle(rank, world):
    """A rank without a backward of its own in the first step takes part in the reduction."""
    case = Case()
    net = make_net(case)
    (loss_of(net, 0, 0, 0) / world).backward()
    torch.optim.SGD(net.parameters(), lr=0.05).step()
    model, optimizer = make_sharded(case, (1, world, world))
    if rank == 0:
        loss_of(model, 0, 0, 0).backward()
    optimizer.step()
    found = weights_of(model)
    train(model, optimizer, case, range(1, 3))
    model.close()
    for name, param in net.named_parameters():
        assert torch.equal(found[name], param.detach()), (rank, name)


def check_error(rank, world):
    """A failing exchange names its unit in the computing thread, on the first wait for it."""
    model, optimizer = make_sharded(Case(), (2, 2, 2))
    train(model, optimizer, Case(), range(1))
    weights_of(model)  # nothing is under way any more
    distributed.barrier()

    def fails(self, sends, receives):
        raise RuntimeError("link is down")

    swap, Exchange._swap = Exchange._swap, fails
    with pytest.raises(EngineError, match=r"of unit .*link is down"):
        train(model, optimizer, Case(), range(1, 3))
    Exchange._swap = swap
    distributed.barrier()
    model.close()


def check_meta(rank, world):
    """A model made on the meta device gets memory and the first rank's values.

    A module whose parameters are in two units (one is frozen) is initialised once for each.
    """
    for sizes in ((world, world, world), (1, 1, 1)):
        with torch.device("meta"):
            net = make_net(Case(tied=True))
        net.layers[0].up.bias.requires_grad_(False)
        torch.manual_seed(rank)
        model = hzp.shard(net, hzp.Config(sharding=sizes, units=type(net.layers[0])))
        weights = weights_of(model)
        assert not any(tensor.is_meta for tensor in weights.values())
        assert float(weights["layers.0.up.weight"].std()) > 0.01
        assert same_on_all(weights, world)
        assert all(torch.equal(weights[name], t) for name, t in hzp.named_whole(model))
        loss_of(model, rank, 0, 0).backward()
        model.close()


def check_mismatch(rank, world):
    """Ranks with different tuples or slots are told so, before anyone waits for another."""
    for sizes, slots in (((2, 2, 2) if rank else (1, 2, 2), 3), ((2, 2, 2), 3 + rank)):
        with pytest.raises(ConfigError, match=rf"different models or configs; rank {rank} has"):
            make_sharded(Case(slots=slots), sizes)


def check_zero(rank, world):
    """A backward on one rank alone can be thrown away, and leaves nothing behind."""
    case = Case()
    expected, _ = expected_run(world, case)
    model, optimizer = make_sharded(case, (1, 1, 1), timeout_s=60)
    if rank == 0:
        loss_of(model, 0, 0, 0).backward()
    optimizer.zero_grad()
    train(model, optimizer, case, range(STEPS))
    found = weights_of(model)
    model.close()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), (rank, name)


def check_lost_file(rank, world, path):
    """Without one rank's file nothing is loaded, on no rank, and nothing is changed."""
    case = Case(optimizer="adamw")
    model, optimizer = make_sharded(case, (2, 2, 2), timeout_s=60)
    train(model, optimizer, case, range(1))
    record = hzp.save_state(path, model, optimizer)
    train(model, optimizer, case, range(1, 2))
    before = weights_of(model)
    for part, number in (("model", 0), ("model", 1), ("optimizer", 0), ("optimizer", 1)):
        distributed.barrier()
        file = sorted((Path(path) / part).glob("*.safetensors"))[number]
        distributed.barrier()
        if rank == 0:
            file.rename(f"{file}.away")
        distributed.barrier()
        with pytest.raises((DataError, ServiceError), match=r"file must be there|another rank"):
            hzp.load_state(path, model, optimizer, record)
        after = weights_of(model)
        assert all(torch.equal(before[name], after[name]) for name in before), (rank, part)
        distributed.barrier()
        if rank == 0:
            Path(f"{file}.away").rename(file)
    distributed.barrier()
    hzp.load_state(path, model, optimizer, record)
    model.close()


def check_load_frozen(rank, world, path):
    """Frozen parameters that are gathered when others are loaded are those that are loaded."""
    case = Case(frozen=True, slots=9)
    first, _ = make_sharded(case, (2, 2, 2))
    record = hzp.save_state(path, first, None)
    distributed.barrier()
    with torch.no_grad():
        expected = loss_of(first, 0, 0, 0)
    first.close()
    net = make_net(case)
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(2.0)
    model = hzp.shard(net, hzp.Config(sharding=(2, 2, 2), units=UNITS, slots=9))
    with torch.no_grad():
        assert loss_of(model, 0, 0, 0) != expected
        hzp.load_state(path, model, None, record)
        assert loss_of(model, 0, 0, 0) == expected
    model.close()


class Broken(torch.autograd.Function):
    """Breaks off a backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("out of memory")


def check_failed_backward(rank, world):
    """A backward that broke off on one rank can be thrown away when the others have sent theirs."""
    case = Case()
    expected, _ = expected_run(world, case)
    for last in (False, True):
        model, optimizer = make_sharded(case, (1, 2, 2), timeout_s=60)
        train(model, optimizer, case, range(1))  # from now on units are sent as they are complete
        if rank == 0:
            model.reduction.last = last
            layer = model.module.layers[0]
            hook = layer.register_forward_hook(lambda module, args, out: Broken.apply(out))
            with pytest.raises(RuntimeError, match="out of memory"):
                loss_of(model, 0, 0, 0).backward()
            hook.remove()
        else:
            loss_of(model, 0, 0, 0).backward()
        optimizer.zero_grad()
        model.reduction.last = True
        train(model, optimizer, case, range(1, STEPS))
        found = weights_of(model)
        model.close()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (rank, last, name)


class Positions(torch.nn.Module):
    """Gives out a part of its parameter itself."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(16, DIM))

    def forward(self, x):
        return {"first": self.table[: x.shape[1]]}


class Placed(torch.nn.Module):
    """Uses what `Positions` gave out after everything else."""

    def __init__(self):
        super().__init__()
        self.positions = Positions()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x):
        positions = self.positions(x)["first"]
        for layer in self.layers:
            x = layer(x).tanh()
        return (x * positions).tanh()


def check_returned_parameter(rank, world):
    """A parameter that a module returns keeps its values when its unit goes."""
    torch.manual_seed(0)
    plain, net = Placed(), Placed()
    net.load_state_dict(plain.state_dict())
    units = (Positions, torch.nn.Linear)
    model = hzp.shard(net, hzp.Config(sharding=(2, 2, 2), units=units, slots=2))
    optimizer = hzp.Optimizer(model, torch.optim.SGD, lr=0.5)
    expected = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(3):
        x = torch.randn(2, 8, DIM)
        losses = [chosen(x).square().sum() for chosen in (plain, model)]
        assert torch.equal(losses[0], losses[1])
        for loss in losses:
            loss.backward()
        expected.step()
        expected.zero_grad()
        optimizer.step()
    model.close()


def check_traffic(rank, world, sizes, slots, expected_gathers):
    """Bytes a step, at steady state, are the ideal ones."""
    case = Case(slots=slots)
    model, optimizer = make_sharded(case, sizes)
    train(model, optimizer, case, range(2))
    weights_of(model)  # waits for what the gather lane has under way
    psi = sum(unit.elements for unit in model.units) * 4
    before = model.traffic()
    train(model, optimizer, case, range(1))
    weights_of(model)
    sent = model.traffic() - before
    extra = psi * (world - 1) // world  # of weights_of
    gathers = sum(n for lane, n in sent.items() if lane.startswith("gather")) - extra
    reduces = sum(n for lane, n in sent.items() if lane.startswith("reduce"))
    assert reduces == psi * (world - 1) // world, sent
    assert gathers <= expected_gathers * psi * (world - 1) // world, (gathers, psi)
    model.close()
