"""Small models for the tests of the library, and their training without it."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn import functional

import asyncflow_hzp as hzp

VOCAB, DIM, STEPS = 50, 32, 2


@dataclass(frozen=True)
class Case:
    """What one training run varies."""

    optimizer: str = "sgd"
    micro_batches: int = 1
    clip: float | None = None
    tied: bool = False
    frozen: bool = False
    checkpoint: bool = False
    low: bool = False  # bfloat16 parameters
    lanes: bool = True
    accumulate: str = "full"
    experts: int = 0  # parts, 0 for a dense model
    slots: int = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class MoeBlock(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(DIM), nn.Linear(DIM, 4, bias=False)
        experts = [
            nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)) for _ in range(4)
        ]
        self.experts = hzp.ExpertParallel(experts, size=parts)

    def forward(self, x):
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        return x + self.experts(tokens, chosen, weights).view(x.shape)


class Net(nn.Module):
    def __init__(self, case, *, parts=1):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        layers = [MoeBlock(parts) if case.experts else Block() for _ in range(3)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if case.tied:
            self.head.weight = self.embed.weight
        if case.frozen:
            self.layers[1].requires_grad_(False)
            self.layers[2].down.requires_grad_(False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


UNITS = (Block, MoeBlock)
KINDS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
}


def make_net(case, *, parts=1):
    torch.manual_seed(0)
    net = Net(case, parts=parts)
    return net.bfloat16() if case.low else net


def loss_of(net, rank, micro, step):
    generator = torch.Generator("cpu").manual_seed(1000 * step + 10 * micro + rank)
    ids = torch.randint(0, VOCAB, (2, 8), generator=generator, device="cpu")
    ids = ids.to(torch.get_default_device())
    return functional.cross_entropy(net(ids).flatten(0, 1).float(), ids.roll(1, 1).flatten())


@cache
def plain_run(world, optimizer, micro_batches, clip, tied, frozen, low, moe):
    """Weights and norms of training on all ranks' batches in one process."""
    case = Case(optimizer, micro_batches, clip, tied, frozen, low=low, experts=int(moe))
    net = make_net(case)
    named = [(name, param) for name, param in net.named_parameters() if param.requires_grad]
    masters = [nn.Parameter(param.detach().float()) for _, param in named]
    kind, settings = KINDS[optimizer]
    chosen, norms = kind(masters, **settings), []
    for step in range(STEPS):
        totals = None
        for rank in range(world):
            sums = None
            for micro in range(micro_batches):
                grads = torch.autograd.grad(
                    loss_of(net, rank, micro, step), [param for _, param in named]
                )
                grads = [grad.float() for grad in grads]
                sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
            totals = sums if totals is None else [a + b for a, b in zip(totals, sums, strict=True)]
        for master, total in zip(masters, totals, strict=True):
            master.grad = total / world
        norms.append(float(nn.utils.clip_grad_norm_(masters, clip or 1e9)))
        chosen.step()
        with torch.no_grad():
            for (_, param), master in zip(named, masters, strict=True):
                param.copy_(master)
    return {name: m.detach() for (name, _), m in zip(named, masters, strict=True)}, norms


def expected_run(world, case):
    return plain_run(
        world,
        case.optimizer,
        case.micro_batches,
        case.clip,
        case.tied,
        case.frozen,
        case.low,
        bool(case.experts),
    )


def make_sharded(case, sizes, **more):
    config = hzp.Config(
        sharding=sizes,
        units=UNITS,
        lanes=case.lanes,
        accumulate=case.accumulate,
        checkpoint=case.checkpoint,
        slots=case.slots,
        **more,
    )
    model = hzp.shard(make_net(case, parts=case.experts or 1), config)
    kind, settings = KINDS[case.optimizer]
    return model, hzp.Optimizer(model, kind, **settings)


def train(model, optimizer, case, steps):
    """The norms of the gradients."""
    norms = []
    for step in steps:
        for micro in range(case.micro_batches - 1):
            with model.no_sync():
                loss_of(model, model.rank, micro, step).backward()
        loss_of(model, model.rank, case.micro_batches - 1, step).backward()
        norms.append(optimizer.clip_grad_norm(case.clip) if case.clip else None)
        optimizer.step()
    return norms


def weights_of(model):
    return {name: tensor.clone() for name, tensor in hzp.named_whole(model, master=True)}
