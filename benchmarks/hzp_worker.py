"""One rank of benchmarks/hzp.py: builds a variant, then makes a step whenever it is told to.

Speaks lines of JSON on stdin and stdout. Run by the benchmark, not by hand.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

VOCAB, DIM, LAYERS, HEADS, TOKENS = 4096, 512, 8, 8, 256
WARM_UP = 2


class Block(nn.Module):
    """A decoder layer of 3.15 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, tokens, 3, HEADS, DIM // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, tokens, DIM))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """29.4 M parameters: embedding, eight layers, untied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_of(model: Any, step: int) -> torch.Tensor:
    """Next-token loss on a few repeated random tokens; each rank has its own."""
    generator = torch.Generator().manual_seed(97 * (step % 4) + distributed.get_rank())
    ids = torch.randint(0, VOCAB, (1, TOKENS + 1), generator=generator)
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class HzpVariant:
    """Our library at a tuple; `local` replaces what crosses the link by copies."""

    def __init__(self, *, sizes: Any, lanes: bool = True, local: bool = False, **more: Any) -> None:
        import asyncflow_hzp as hzp
        from asyncflow_hzp.exchange import Exchange

        if local:
            Exchange._swap = _local_swap  # type: ignore[method-assign]
        torch.manual_seed(0)
        config = hzp.Config(sharding=sizes, units=Block, lanes=lanes, **more)
        self.model = hzp.shard(Model(), config)
        self.optimizer = hzp.Optimizer(self.model, torch.optim.AdamW, lr=1e-3, fused=True)

    def step(self, number: int) -> float:
        loss = loss_of(self.model, number)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def sent(self) -> dict[str, int]:
        return dict(self.model.traffic())


def _local_swap(self: Any, sends: Any, receives: Any) -> None:
    """What arrives is what this rank would have sent: same sizes, no link."""
    for (_, source), (rank, target) in zip(sends, receives, strict=True):
        if rank != self.rank:
            target.copy_(source[: target.numel()])


class Fsdp2Variant:
    """FSDP2 on the same model."""

    def __init__(
        self, *, reshard: bool | None = None, prefetch: int = 0, shape: list[int] | None = None
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        self.model = Model()
        sizes = tuple(shape or [distributed.get_world_size()])
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=reshard)
        layers = list(self.model.layers)
        for number, layer in enumerate(layers) if prefetch else ():
            layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + prefetch])
            layer.set_modules_to_backward_prefetch(layers[max(number - prefetch, 0) : number][::-1])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def step(self, number: int) -> float:
        loss = loss_of(self.model, number)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def sent(self) -> dict[str, int]:
        return {}


class LinkVariant:
    """The rate of the link, both directions at once."""

    def __init__(self) -> None:
        self._out, self._in = torch.ones(2**22), torch.empty(2**22)

    def step(self, number: int) -> float:
        other = 1 - distributed.get_rank()
        works = [distributed.irecv(self._in, other), distributed.isend(self._out, other)]
        start = time.perf_counter()
        for work in works:
            work.wait()
        return self._out.nbytes / (time.perf_counter() - start)

    def sent(self) -> dict[str, int]:
        return {}


VARIANTS: dict[str, Callable[..., Any]] = {
    "hzp": HzpVariant,
    "fsdp2": Fsdp2Variant,
    "link": LinkVariant,
}


def memory(key: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def main() -> None:
    order = json.loads(sys.argv[1])
    os.sched_setaffinity(0, {order["core"]})
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=order["rank"], world_size=order["world"])
    (torch.ones(256, 256) @ torch.ones(256, 256)).sum()
    distributed.barrier()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    variant = VARIANTS[order["kind"]](**order["options"])
    number = 0

    def step() -> dict[str, Any]:
        nonlocal number
        distributed.barrier()
        sent = sum(variant.sent().values())
        start = time.perf_counter()
        value = variant.step(number)
        number += 1
        seconds = time.perf_counter() - start
        return {
            "s": seconds,
            "value": value,
            "peak": memory("VmHWM") - before,
            "sent": sum(variant.sent().values()) - sent,
            "by_link": variant.sent(),
        }

    for _ in range(WARM_UP):
        answer = step()
    print(json.dumps(answer), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(step() if command == "step" else count_allocations(step)), flush=True)


def count_allocations(step: Callable[[], Any]) -> dict[str, Any]:
    from hzp_allocations import counting

    with counting() as found:
        for _ in range(8):
            step()
    return {"allocations": found}


if __name__ == "__main__":
    main()
