"""`hzp.shard`: a model whose parameters, gradients and optimizer state are spread over ranks."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn

from asyncflow_core.errors import ConfigError
from asyncflow_hzp.config import Config
from asyncflow_hzp.exchange import Exchange
from asyncflow_hzp.hooks import wrap
from asyncflow_hzp.lanes import Lane
from asyncflow_hzp.layout import Layout, Sizes, parse_sizes
from asyncflow_hzp.links import Links, node_size, same_everywhere, world
from asyncflow_hzp.materialize import materialize, materialize_buffers
from asyncflow_hzp.planning import plan_cuts
from asyncflow_hzp.reduction import Reduction
from asyncflow_hzp.residency import Residency
from asyncflow_hzp.unit import Unit
from asyncflow_hzp.units import Cut, cut_units, parts_in

__all__ = ["Sharded", "shard"]


def shard(model: nn.Module, config: Config | None = None) -> Sharded:
    """Spread a model over all ranks of the default process group, in place.

    All ranks call it with the same model and config. Parameters are gathered for their module's
    forward and backward only; at other times they read as NaN (unless z3 is 1).

    Args:
        model: any module; parameters on the meta device are made unit by unit.
        config: how.

    Raises:
        ConfigError: the config does not fit the model or the ranks.
    """
    return Sharded(model, config or Config())


class Sharded:
    """A sharded model: call it as the model. `close` it before the process group goes.

    Concurrency: one thread computes; the lanes' threads are inside.
    """

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.module = model
        self.config = config
        self.rank, self.world_size = world()
        self.node_size = node_size(config.node_size, self.world_size)
        cuts = cut_units(model, config.units)
        self.sizes = self._choose_sizes(cuts)
        self._layouts, columns = self._families(cuts)
        self.device = _device_of(cuts)
        self._check_same(cuts)
        self._gathers = self._links(columns)
        self._reduces = self._links(columns)
        self.units = [self._make_unit(number, cut) for number, cut in enumerate(cuts)]
        materialize_buffers(model, self.device, config.init)
        self._gather_lane = Lane("gather", device=self.device, threaded=self._threaded)
        self._reduce_lane = Lane("reduce", device=self.device, threaded=self._threaded)
        self.residency = Residency(
            self.units,
            self._gather_lane,
            self._exchange_of(self._gathers),
            slots=self._slots(),
            ahead=self._threaded,
        )
        self.reduction = Reduction(
            [unit for unit in self.units if unit.trainable],
            self._reduce_lane,
            self._exchange_of(self._reduces),
            dtype=config.reduce_dtype,
            buffers=max(config.grad_buffers, 1),
            accumulate=config.accumulate,
            scale=1 / self.world_size if config.average else 1.0,
            agree=self._agree,
        )
        self.reduction.on_end = self._end_backward
        self.residency.changes = lambda: self.reduction.last
        self._undo = self._wrap(cuts)
        self._closed = False

    @property
    def _threaded(self) -> bool:
        return self.config.lanes and self.world_size > 1

    def _choose_sizes(self, cuts: Sequence[Cut]) -> Sizes:
        if self.config.sharding == "auto":
            return plan_cuts(cuts, self.config, self.world_size).best.sizes
        return parse_sizes(self.config.sharding, world=self.world_size, node=self.node_size)

    def _families(
        self, cuts: Sequence[Cut]
    ) -> tuple[dict[str, Layout], dict[str, list[tuple[int, ...]]]]:
        """For each family its layout here, and every rank list of it anywhere."""
        layouts: dict[str, Layout] = {}
        columns: dict[str, list[tuple[int, ...]]] = {}
        for family in sorted({cut.family for cut in cuts}):
            parts = parts_in(family)
            if self.world_size % parts:
                raise ConfigError(f"{parts} expert parts do not divide {self.world_size} ranks")
            columns[family] = [tuple(range(p, self.world_size, parts)) for p in range(parts)]
            ranks = columns[family][self.rank % parts]
            sizes = self.sizes
            if parts > 1:
                fitting = tuple(min(size, len(ranks)) for size in sizes)
                sizes = parse_sizes(
                    self.config.expert_sharding or fitting, world=len(ranks), node=1
                )
            layouts[family] = Layout(sizes, ranks, ranks.index(self.rank))
        return layouts, columns

    def _check_same(self, cuts: Sequence[Cut]) -> None:
        """Refuse ranks that differ: they would wait for one another, or mix up what they send."""
        mine = [
            [cut.elements, str(cut.kind), tuple(layout.sizes)]
            for cut, layout in ((cut, self._layouts[cut.family]) for cut in cuts)
        ]
        config = self.config  # of what decides who sends what, and in which order
        told = (
            (config.accumulate, config.average, config.checkpoint, self._threaded),
            (config.slots, config.slot_bytes, self.node_size),
            (config.reduce_dtype, config.param_dtype, config.master_dtype),
        )
        digest = hashlib.sha256(repr((mine, told)).encode()).digest()
        if not same_everywhere(int.from_bytes(digest[:7]), self.device):
            raise ConfigError(
                f"the ranks were given different models or configs; rank {self.rank} has sharding "
                f"{self.sizes}, {len(cuts)} units of {sum(cut.elements for cut in cuts)} elements, "
                f"nodes of {self.node_size} ranks, {config}"
            )

    def _make_unit(self, number: int, cut: Cut) -> Unit:
        config, layout = self.config, self._layouts[cut.family]
        made = cut.named[0][1].is_meta
        if made:
            materialize(self.module, cut, self.device, config.init)
        unit = Unit(
            number,
            cut.name,
            cut.named,
            layout,
            family=cut.family,
            dtype=config.param_dtype or cut.named[0][1].dtype,
            master_dtype=config.master_dtype,
        )
        flat = unit.flat(torch.promote_types(unit.master_dtype, unit.dtype), self.device)
        if made:  # random numbers may differ by rank: those of the first one count
            flat.mul_(float(layout.place == 0))
            self._gathers.exchange(cut.family).all_reduce(flat, layout.ranks)
        unit.take(flat)
        return unit

    def _links(self, columns: dict[str, list[tuple[int, ...]]]) -> Links:
        return Links(
            self._layouts,
            columns,
            node_size=self.node_size,
            device=self.device,
            timeout_s=self.config.timeout_s,
        )

    def _exchange_of(self, links: Links) -> Callable[[Unit], Exchange]:
        return lambda unit: links.exchange(unit.family)

    def _slots(self) -> int:
        budget = self.config.slot_bytes
        if budget is None:
            return max(self.config.slots, 2)
        sizes = sorted((u.elements * u.dtype.itemsize for u in self.units), reverse=True)
        fitting = sum(1 for n in range(len(sizes)) if sum(sizes[: n + 1]) <= budget)
        return max(fitting, 2)

    def _wrap(self, cuts: Sequence[Cut]) -> list[Callable[[], None]]:
        needs: dict[nn.Module, list[Unit]] = {}
        for cut, unit in zip(cuts, self.units, strict=True):
            for module in cut.modules:
                needs.setdefault(module, []).append(unit)
        if self.world_size == 1 and not self.config.checkpoint:
            return []
        again = {module for cut in cuts if cut.chosen for module in cut.modules}
        return [
            wrap(
                module,
                units,
                self.residency,
                recompute=self.config.checkpoint and module in again,
            )
            for module, units in needs.items()
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add up; the next one outside reduces them all."""
        before = self.reduction.last
        self.reduction.last = False
        try:
            yield
        finally:
            self.reduction.last = before

    def _agree(self, order: list[int], traced: bool) -> list[int] | None:
        """The first rank's order, if it has traced one."""
        if self.world_size > 1:
            found = torch.tensor([int(traced), *order], device=self.device)
            distributed.broadcast(found, 0)
            traced, order = bool(found[0]), found[1:].tolist()
        return order if traced else None

    def _end_backward(self) -> None:
        self.residency.end_backward(again=not self.reduction.last)

    def settle(self) -> None:
        """Wait until updates have reached all ranks; whole parameters can then be read anywhere."""
        for unit in self.units:
            unit.settle()

    def gathered(self, unit: Unit) -> torch.Tensor:
        """A unit's parameters [n], valid until another is asked for. All ranks call it."""
        if unit.whole:
            unit.settle()
            return unit.held
        return self.residency.look(unit)

    def collect(self, unit: Unit, shard: torch.Tensor) -> torch.Tensor:
        """A new tensor [n] of what ranks hold in shards [n/z1]. All ranks call it."""
        flat = torch.empty(unit.elements, dtype=shard.dtype, device=self.device)
        flat[slice(*unit.shard)].copy_(shard)
        pieces = unit.layout.pieces(unit.layout.sizes.z1, 1, unit.elements)
        exchange = self._gathers.exchange(unit.family)
        job = self._gather_lane.submit(f"unit {unit.name!r}", lambda: exchange.gather(flat, pieces))
        job.wait()
        return flat

    def traffic(self) -> Counter[str]:
        """Bytes this rank sent since the start, by lane and class of link ("gather inter")."""
        total: Counter[str] = Counter()
        for lane, links in (("gather", self._gathers), ("reduce", self._reduces)):
            total.update({f"{lane} {link}": sent for link, sent in links.sent().items()})
        return total

    @property
    def replicated(self) -> bool:
        """Whether the parameters are always whole on every rank."""
        return all(unit.whole for unit in self.units)

    def close(self) -> None:
        """End the lanes; the model's own forward is back, its parameters stay sharded."""
        if self._closed:
            return
        self._closed = True
        for lane in (self._gather_lane, self._reduce_lane):
            lane.close()
        for links in (self._gathers, self._reduces):
            links.close()
        for undo in self._undo:
            undo()


def _device_of(cuts: Sequence[Cut]) -> torch.device:
    devices = {param.device for cut in cuts for _, param in cut.named if not param.is_meta}
    if len(devices) > 1:
        raise ConfigError(f"the model lies on several devices: {sorted(map(str, devices))}")
    if devices:
        return devices.pop()
    cuda = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
