"""New weights in a simulated run: the run's own protocol, each step of it a time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from asyncflow_core.flow.simulation.clock import Clock
from asyncflow_core.flow.simulation.replica import Replica
from asyncflow_core.flow.simulation.times import WeightTimes
from asyncflow_core.flow.weights.instructions import Commit, Instruction, Stage
from asyncflow_core.flow.weights.protocol import WeightProtocol

__all__ = ["Weights"]

_FOR_EVER = 1e12


class Weights:
    """Brings each version to all replicas; version 0 serves from the start."""

    def __init__(
        self,
        clock: Clock,
        times: WeightTimes,
        replicas: Mapping[str, Replica],
        *,
        overlaps_fetch: bool,
    ) -> None:
        """Take replicas by name; with `overlaps_fetch` they stage beside the export."""
        self._clock = clock
        self._times = times
        self._replicas = replicas
        self._overlaps = overlaps_fetch
        self._protocol = WeightProtocol(stage_timeout_s=_FOR_EVER, commit_timeout_s=_FOR_EVER)
        for name in replicas:
            self._protocol.join(name, 0.0)
        for stage in self._protocol.published(0, "0", 0.0):
            assert isinstance(stage, Stage)
            for commit in self._protocol.staged(stage.replica, stage.call, "0", 0.0):
                assert isinstance(commit, Commit)
                self._protocol.committed(commit.replica, commit.call, 0.0)

    def publish(self, version: int) -> float:
        """A version begins to be exported; when that ends."""
        if self._overlaps:
            self._carry_out(self._protocol.coming(version, self._clock.now))
        ends = self._clock.now + self._times.export_s
        self._clock.at(ends, partial(self._published, version))
        return ends

    def _published(self, version: int) -> None:
        self._carry_out(self._protocol.published(version, str(version), self._clock.now))

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Stage):
                self._clock.after(self._times.stage_s, partial(self._staged, instruction))
            elif isinstance(instruction, Commit):
                replica = self._replicas[instruction.replica]
                done = partial(self._committed, instruction)
                replica.commit(instruction.version, self._times.commit_s, done)

    def _staged(self, told: Stage) -> None:
        checksum = str(told.version)
        self._carry_out(self._protocol.staged(told.replica, told.call, checksum, self._clock.now))

    def _committed(self, told: Commit) -> None:
        self._carry_out(self._protocol.committed(told.replica, told.call, self._clock.now))
