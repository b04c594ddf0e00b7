"""One rank of benchmarks/hzp.py: builds a variant, then makes a step whenever it is told to.

Speaks lines of JSON on stdin and stdout. Run by the benchmark, not by hand.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

VOCAB, DIM, LAYERS, HEADS, TOKENS = 4096, 512, 8, 8, 256
WARM_UP, TIMED = 2, 2


class Block(nn.Module):
    """A decoder layer of 3.15 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = _linear(DIM, 3 * DIM), _linear(DIM, DIM)
        self.up, self.down = _linear(DIM, 4 * DIM), _linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, tokens, 3, HEADS, DIM // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, tokens, DIM))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


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

    def facts(self) -> dict[str, Any]:
        """Bytes sent, and what memory of states, buffers and activations must be there."""
        model = self.model
        units = [unit for unit in model.units if unit.trainable]
        states = sum(unit.held.nbytes + 3 * unit.master.nbytes for unit in units)
        slots = sum(slot.buffer.nbytes for slot in model.residency.slots)
        full = max(unit.elements for unit in units) * 4
        sharded = model.sizes.z1 > 1
        buffers = full * model.config.grad_buffers + full * (1 - 1 / model.sizes.z2)
        return {
            "sent": dict(model.traffic()),
            "theory": round(states + slots + sharded * buffers + activations()),
        }


def activations() -> int:
    """Bytes that autograd keeps of one forward of the plain model, parameters left out."""
    torch.manual_seed(0)
    model, kept = Model(), dict[int, int]()
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model, 0)
    del loss
    return sum(kept.values())


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
        layers: list[Any] = list(self.model.layers)
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

    def facts(self) -> dict[str, Any]:
        return {}


class LinkVariant:
    """Swaps as many bytes a step as an ideal step sends, both directions at once."""

    def __init__(self, *, nbytes: int) -> None:
        self._out, self._in = torch.ones(nbytes // 4), torch.empty(nbytes // 4)

    def step(self, number: int) -> float:
        other = 1 - distributed.get_rank()
        works = [distributed.irecv(self._in, other), distributed.isend(self._out, other)]
        for work in works:
            work.wait()
        return 0.0

    def facts(self) -> dict[str, Any]:
        return {}


class PlainVariant:
    """The model and optimizer of one rank without sharding: what torch itself costs."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._model = Model()
        for param in self._model.parameters():  # gradients are gone at once, as with hzp
            param.register_post_accumulate_grad_hook(_forget)

    def step(self, number: int) -> float:
        loss = loss_of(self._model, number)
        loss.backward()
        return float(loss.detach())

    def facts(self) -> dict[str, Any]:
        """Memory that must be there: parameters and what autograd keeps."""
        held = sum(param.nbytes for param in self._model.parameters())
        return {"theory": held + activations()}


def _forget(param: torch.Tensor) -> None:
    param.grad = None


class DeepSpeedVariant:
    """DeepSpeed ZeRO-3 on the same model; every parameter is partitioned."""

    def __init__(self, *, overlap: bool = False) -> None:
        import deepspeed

        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        zero = {"stage": 3, "overlap_comm": overlap, "stage3_param_persistence_threshold": 0}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
            "steps_per_print": 1 << 30,
        }
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )

    def step(self, number: int) -> float:
        loss = loss_of(self._engine, number)
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.detach())

    def facts(self) -> dict[str, Any]:
        return {}


VARIANTS: dict[str, Callable[..., Any]] = {
    "hzp": HzpVariant,
    "fsdp2": Fsdp2Variant,
    "link": LinkVariant,
    "plain": PlainVariant,
    "deepspeed": DeepSpeedVariant,
}


OURS = ("asyncflow_hzp.sharded", "asyncflow_hzp.optimizer", "torch.distributed.fsdp")
CODE = {"deepspeed": ("deepspeed",)}


def memory(key: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def sent_by_node(device: str) -> int:
    """Bytes that left this namespace by a device."""
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


class Rank:
    """The variant of this process, and its steps."""

    def __init__(self, order: dict[str, Any]) -> None:
        (torch.ones(256, 256) @ torch.ones(256, 256)).sum()
        for module in CODE.get(order["kind"], OURS):
            import_module(module)  # code is not what memory is measured of
        distributed.barrier()
        self._before = memory("VmRSS")
        self._variant = VARIANTS[order["kind"]](**order["options"])
        self._number = 0
        self._device = order["device"]

    def step(self) -> float:
        value: float = self._variant.step(self._number)
        self._number += 1
        return value

    def steps(self) -> dict[str, Any]:
        """The mean of some steps that follow another one.

        What each step leaves under way is paid by the next: the first timed one pays for the
        untimed one, the last leaves as much.
        """
        distributed.barrier()
        self.step()
        sent, start = sent_by_node(self._device), time.perf_counter()
        for _ in range(TIMED):
            self.step()
        seconds = time.perf_counter() - start
        node, peak = sent_by_node(self._device) - sent, memory("VmHWM") - self._before
        return {"s": seconds / TIMED, "peak": peak, "node_sent": node / TIMED}

    def warm_up(self) -> dict[str, Any]:
        distributed.barrier()
        for _ in range(WARM_UP):
            self.step()
        Path("/proc/self/clear_refs").write_text("5")  # peak memory is that of steady state
        return {}

    def allocations(self) -> dict[str, Any]:
        from hzp_allocations import counting

        with counting() as found:
            for _ in range(8):
                self.step()
        return dict(found)

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = self._variant.facts()
        return facts


def main() -> None:
    order = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    os.sched_setaffinity(0, {order["core"]})
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=order["rank"], world_size=order["world"])
    rank = Rank(order)
    for line in sys.stdin:
        print(json.dumps(getattr(rank, json.loads(line))()), file=answers, flush=True)
    os._exit(0)  # without the tear-down of process groups, which waits for all ranks


if __name__ == "__main__":
    main()
