"""Which allocation is fastest under a budget of devices: prune by bounds, simulate the rest. Pure.

More replicas, and more workers that take no devices, are never slower. So of each choice of the
other numbers only the most of them can win; then the fewest that are as fast are looked for.

Source: AsyncFlow (arXiv 2507.01663): a simulation of the graph of tasks under the device budget,
an analytical model to prune and a profile for what is left.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from asyncflow_core.errors import ConfigError
from asyncflow_core.flow.simulation.bounds import lower_bound
from asyncflow_core.flow.simulation.simulator import Simulated, simulate
from asyncflow_core.flow.simulation.times import Times
from asyncflow_core.flow.simulation.workload import Allocation, Workload

__all__ = ["Candidate", "Devices", "Found", "Sample", "search"]

_AS_FAST = 1.005
"""Times within this factor are equal; the cheaper allocation wins."""
_NEAR = 1.02
"""A bound is exact over a whole run; of the steps that are measured, a little work may lie outside.
So what is above the best by no more than this is simulated all the same."""
_ROWS = 6000
"""About so many rows are simulated, within these steps."""
_LEAST_STEPS, _MOST_STEPS = 12, 32


@dataclass(frozen=True, slots=True)
class Devices:
    """What one service of each kind takes; stages without a model of their own take none."""

    replica: int
    rank: int
    workers: Mapping[str, int]

    @classmethod
    def of(cls, work: Workload) -> Devices:
        """By the configuration: `devices` shared out, else one each."""
        config = work.config
        workers = {}
        for name, stage in config.stages.items():
            model = config.models.get(stage.model)
            if model is None:
                workers[name] = 0
            elif model.devices:
                workers[name] = len(model.devices) // stage.workers
            else:
                workers[name] = model.world_size
        replica = len(config.rollout.devices) // config.rollout.replicas or 1
        return cls(replica, 1, workers)

    def beside_rollout(self, ranks: int, workers: Mapping[str, int]) -> int:
        """Taken by the trainer and the stages."""
        return ranks * self.rank + sum(self.workers[name] * n for name, n in workers.items())

    def taken(self, allocation: Allocation) -> int:
        """By all together."""
        beside = self.beside_rollout(allocation.ranks, allocation.workers)
        return beside + allocation.replicas * self.replica


@dataclass(frozen=True, slots=True)
class Sample:
    """What is simulated of a run, the same for every candidate.

    Attributes:
        lengths: tokens of the responses of each group, of all steps.
        first: steps that are not measured.
    """

    lengths: Sequence[Sequence[int]]
    first: int

    @classmethod
    def of(cls, work: Workload, times: Times, *, steps: int | None = None) -> Sample:
        """Draw it, by the seed of the run; `steps` measured ones, or as many as seem enough."""
        flow = work.config.workflow
        rows = flow.groups_per_step * flow.group_size
        first = 4 + 2 * flow.bound
        measured = steps or min(max(_ROWS // rows, _LEAST_STEPS), _MOST_STEPS)
        groups = (first + measured) * flow.groups_per_step
        lengths = times.lengths.draw(groups, flow.group_size, seed=work.config.seed)
        return cls(lengths, first)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A simulated allocation.

    Attributes:
        devices: that it takes.
        bound_s: least seconds of a step, whatever is simulated.
    """

    allocation: Allocation
    devices: int
    bound_s: float
    simulated: Simulated


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    Attributes:
        best: the fastest, and of those as fast the one with fewest devices.
        present: the configuration's own allocation; None if the budget is too small for it.
        candidates: simulated, fastest first.
        allocations: that there are in the budget.
    """

    best: Candidate
    present: Candidate | None
    candidates: tuple[Candidate, ...]
    allocations: int


def search(
    work: Workload,
    times: Times,
    sample: Sample,
    *,
    devices: int,
    ranks: Sequence[int],
    workers: Mapping[str, Sequence[int]],
) -> Found:
    """Look at every allocation under the budget.

    Args:
        work: what is done.
        times: what it takes.
        sample: what is simulated of it.
        devices: budget.
        ranks: numbers of trainer ranks to choose from.
        workers: stage to numbers of workers; stages that are not named keep theirs.

    Raises:
        ConfigError: nothing fits the budget.
    """
    return _Search(work, times, sample, devices).run(ranks, workers)


class _Search:
    def __init__(self, work: Workload, times: Times, sample: Sample, devices: int) -> None:
        self._work = work
        self._times = times
        self._sample = sample
        self._budget = devices
        self._devices = Devices.of(work)
        self._made: dict[tuple[int, int, tuple[tuple[str, int], ...]], Candidate] = {}

    def run(self, ranks: Sequence[int], workers: Mapping[str, Sequence[int]]) -> Found:
        every = list(self._most_replicas(ranks, workers))
        if not every:
            raise ConfigError(self._too_few(ranks, workers))
        free = {name: n for name, n in workers.items() if not self._devices.workers[name]}
        most = {name: max(numbers) for name, numbers in free.items()}
        largest = [a for a in every if all(a.workers[name] == n for name, n in most.items())]
        best = self._cheapest(self._fastest(largest))
        for name, numbers in free.items():
            best = self._fewest_workers(best, name, sorted(numbers))
        present = self._work.allocation
        fits = self._devices.taken(present) <= self._budget
        now = self._simulated(present) if fits else None
        made = sorted(self._made.values(), key=lambda c: (c.simulated.step_s, c.devices))
        if now is not None and now.simulated.step_s < best.simulated.step_s / _AS_FAST:
            best = now
        return Found(
            best=best,
            present=now,
            candidates=tuple(made),
            allocations=sum(allocation.replicas for allocation in every),
        )

    def _most_replicas(
        self, ranks: Sequence[int], workers: Mapping[str, Sequence[int]]
    ) -> Iterator[Allocation]:
        """Each choice of ranks and workers, with all the replicas that are left for."""
        kept = {name: [n] for name, n in self._work.allocation.workers.items()}
        chosen = {**kept, **workers}
        for count in ranks:
            for numbers in itertools.product(*chosen.values()):
                of_stages = dict(zip(chosen, numbers, strict=True))
                left = self._budget - self._devices.beside_rollout(count, of_stages)
                if left >= self._devices.replica:
                    yield Allocation(left // self._devices.replica, count, of_stages)

    def _fastest(self, most: Sequence[Allocation]) -> list[Candidate]:
        """Those that none of the others beats; what cannot win by its bound is not simulated."""
        bounds = [(self._bound(a), self._devices.taken(a), at) for at, a in enumerate(most)]
        made: list[Candidate] = []
        best_s = float("inf")
        for bound_s, _, at in sorted(bounds):
            if bound_s > best_s * _NEAR:
                break  # the others are no faster
            made.append(self._simulated(most[at]))
            best_s = min(best_s, made[-1].simulated.step_s)
        return [c for c in made if c.simulated.step_s <= best_s * _AS_FAST]

    def _cheapest(self, fast: Sequence[Candidate]) -> Candidate:
        """The fewest devices that are as fast as the fastest."""
        limit_s = min(c.simulated.step_s for c in fast) * _AS_FAST
        best = min(fast, key=lambda c: (c.devices, c.simulated.step_s))
        by_ranks = sorted(fast, key=lambda c: self._beside(c.allocation))
        for candidate in by_ranks:
            at = candidate.allocation
            # One device less than the best so far: if that is too slow, so is anything below.
            left = best.devices - 1 - self._beside(at)
            tried = min(at.replicas, left // self._devices.replica)
            if tried >= 1 and (found := self._as_fast(at, tried, limit_s)):
                best = self._fewest_replicas(found, limit_s)
        return best

    def _beside(self, allocation: Allocation) -> int:
        return self._devices.beside_rollout(allocation.ranks, allocation.workers)

    def _fewest_replicas(self, found: Candidate, limit_s: float) -> Candidate:
        few, many = 0, found.allocation.replicas
        while many - few > 1:
            middle = (few + many) // 2
            tried = self._as_fast(found.allocation, middle, limit_s)
            if tried is None:
                few = middle
            else:
                found, many = tried, middle
        return found

    def _as_fast(self, at: Allocation, replicas: int, limit_s: float) -> Candidate | None:
        tried = Allocation(replicas, at.ranks, at.workers)
        if self._bound(tried) > limit_s * _NEAR:
            return None
        found = self._simulated(tried)
        return found if found.simulated.step_s <= limit_s else None

    def _fewest_workers(self, best: Candidate, stage: str, numbers: Sequence[int]) -> Candidate:
        """Of a stage whose workers take no devices."""
        limit_s, at = best.simulated.step_s * _AS_FAST, best.allocation
        for count in numbers:
            if count < at.workers[stage]:
                fewer = Allocation(at.replicas, at.ranks, {**at.workers, stage: count})
                if found := self._as_fast(fewer, at.replicas, limit_s):
                    return found
        return best

    def _bound(self, allocation: Allocation) -> float:
        return lower_bound(self._work, allocation, self._times, self._sample.lengths)

    def _simulated(self, allocation: Allocation) -> Candidate:
        key = (allocation.replicas, allocation.ranks, tuple(sorted(allocation.workers.items())))
        if key not in self._made:
            self._made[key] = Candidate(
                allocation,
                self._devices.taken(allocation),
                self._bound(allocation),
                simulate(
                    self._work,
                    allocation,
                    self._times,
                    self._sample.lengths,
                    first=self._sample.first,
                ),
            )
        return self._made[key]

    def _too_few(self, ranks: Sequence[int], workers: Mapping[str, Sequence[int]]) -> str:
        least = {name: min(numbers) for name, numbers in workers.items()}
        needed = self._devices.beside_rollout(
            min(ranks), {**self._work.allocation.workers, **least}
        )
        return (
            f"devices: {self._budget} are too few: one replica and {min(ranks)} trainer rank(s) "
            f"with the stages take {needed + self._devices.replica}"
        )
