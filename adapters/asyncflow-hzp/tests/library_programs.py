"""Random programs on ranks of a real process group, against one process that does the same."""

import random

import torch
from library_models import DIM, UNITS, Case, loss_of, make_net, weights_of

import asyncflow_hzp as hzp
from asyncflow_hzp.layout import valid_sizes


class Plain:
    """One process that trains on the batches of all ranks."""

    def __init__(self, case, world):
        self.net, self.world = make_net(case), world
        self.params = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.params, lr=0.05, momentum=0.9)
        self.sums = [torch.zeros_like(p) for p in self.params]

    def backward(self, micro, step):
        for rank in range(self.world):
            loss = loss_of(self.net, rank, micro, step) / self.world
            for total, grad in zip(self.sums, torch.autograd.grad(loss, self.params), strict=True):
                total.add_(grad)

    def update(self, clip):
        for param, total in zip(self.params, self.sums, strict=True):
            param.grad = total.clone()
        if clip:
            torch.nn.utils.clip_grad_norm_(self.params, clip)
        self.optimizer.step()
        self.forget()

    def forget(self):
        for total in self.sums:
            total.zero_()


def check_random_programs(rank, world, seeds):
    """Whatever is called between updates, in whatever order, training goes on as one process."""
    for seed in seeds:
        chance = random.Random(seed)
        case = Case(
            tied=chance.random() < 0.5,
            frozen=chance.random() < 0.5,
            checkpoint=chance.random() < 0.3,
            accumulate=chance.choice(["full", "shard"]),
            slots=chance.choice([2, 3, 9]),
        )
        sizes = chance.choice(list(valid_sizes(world)))
        plain = Plain(case, world)
        model = hzp.shard(
            make_net(case),
            hzp.Config(
                sharding=sizes,
                units=UNITS,
                checkpoint=case.checkpoint,
                accumulate=case.accumulate,
                slots=case.slots,
                timeout_s=60,
            ),
        )
        optimizer = hzp.Optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9)
        program = run_program(chance, rank, plain, model, optimizer)
        found = weights_of(model)
        model.close()
        for name, param in plain.net.named_parameters():
            worst = float((found[name] - param.detach()).abs().max())
            assert worst < 1e-5, (seed, sizes, case, program, name, worst)


def looked_at(what, chance, rank, plain, model):
    """What both models say of themselves, between the micro-batches of an update."""
    if what == "loss":
        yield tuple(loss_of(net, rank, 7, 0) for net in (model, plain.net))
    elif what == "block":
        number, x = chance.randint(0, 2), torch.ones(2, DIM)
        yield tuple(net.layers[number](x) for net in (model.module, plain.net))
    elif what in ("whole", "master"):
        params = dict(plain.net.named_parameters())
        for name, found in hzp.named_whole(model, master=what == "master"):
            yield found, params[name]


def run_program(chance, rank, plain, model, optimizer):
    """Some random calls on both; what they were."""
    program = []
    for step in range(6):
        micro_batches = chance.randint(0, 3)
        for micro in range(micro_batches):
            program.append(chance.choice(["", "", "loss", "block", "whole", "master", "unused"]))
            if program[-1] == "unused":
                loss_of(model, rank, 8, step)  # no backward follows
            with torch.no_grad():
                for found, expected in looked_at(program[-1], chance, rank, plain, model):
                    assert float((found - expected).abs().max()) < 1e-5, program
            plain.backward(micro, step)
            if micro < micro_batches - 1:
                with model.no_sync():
                    loss_of(model, rank, micro, step).backward()
            else:
                loss_of(model, rank, micro, step).backward()
        program.append(end := chance.choice(["step", "step", "clip", "zero"]))
        if end == "zero":
            plain.forget()
            optimizer.zero_grad()
            continue
        clip = 0.5 if end == "clip" else None
        if clip:
            optimizer.clip_grad_norm(clip)
        plain.update(clip)
        optimizer.step()
    return program
