"""What work takes: the model of times that a simulation of a run is made with. Pure.

Each is measured (`profiles.py`), or written by hand; either way it is small enough to be read.

Units: seconds, tokens. A rate that depends on how much goes on is a line, no table: an engine that
decodes n sequences takes, for one token of each, a time for reading the weights and a time for each
sequence.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from asyncflow_core.config import Section

__all__ = ["Lengths", "RolloutTimes", "StageTimes", "Times", "TrainerTimes", "WeightTimes"]

Seconds = Annotated[float, Field(ge=0.0)]


class Lengths(Section):
    """Tokens of responses."""

    mean: float | None = Field(None, ge=1.0)
    """Mean of a lognormal distribution, before `longest` cuts it."""
    sigma: float = Field(0.0, ge=0.0)
    """Its sigma, that of the logarithms; 0: all are of the mean length."""
    longest: int | None = Field(None, ge=1)
    """Longer ones are cut."""
    groups: tuple[Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)], ...] = ()
    """Instead: lengths that were recorded, a prompt group each, in the order of the prompts; they
    are taken in this order, and from the beginning again."""
    prompt: float = Field(0.0, ge=0.0)
    """Mean tokens of a prompt."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Lengths:
        if (self.mean is None) == (not self.groups):
            raise ValueError("response lengths have either a `mean` or `groups`, exactly one")
        if self.groups and (self.sigma or self.longest):
            raise ValueError("recorded lengths take no sigma and no longest")
        return self

    def draw(self, groups: int, size: int, *, seed: int) -> list[list[int]]:
        """Lengths of so many groups [groups][size]; the same for the same seed."""
        if self.groups:
            return [_resized(self.groups[at % len(self.groups)], size) for at in range(groups)]
        assert self.mean is not None
        normal = np.random.default_rng(seed).standard_normal((groups, size))
        drawn = self.mean * np.exp(self.sigma * normal - self.sigma**2 / 2)
        cut = np.minimum(drawn, np.inf if self.longest is None else self.longest)
        found: list[list[int]] = np.maximum(1, np.rint(cut)).astype(np.int64).tolist()
        return found


def _resized(group: tuple[int, ...], size: int) -> list[int]:
    return [group[at % len(group)] for at in range(size)]


class RolloutTimes(Section):
    """One replica."""

    token_s: Seconds
    """Of a token of every running sequence, however many those are."""
    token_row_s: Seconds = 0.0
    """What each running sequence adds to it."""
    row_s: Seconds = 0.0
    """Of a response, beside its tokens: its prompt, its way to the store."""

    @model_validator(mode="after")
    def _takes_time(self) -> RolloutTimes:
        if not self.token_s + self.token_row_s:
            raise ValueError("a token takes time: token_s and token_row_s are both 0")
        return self

    def step_s(self, running: int) -> float:
        """Of one token of each of so many sequences."""
        return self.token_s + running * self.token_row_s

    def rate(self, running: int) -> float:
        """Tokens a second of so many sequences together."""
        return running / self.step_s(running)


class StageTimes(Section):
    """One worker of a stage."""

    call_s: Seconds = 0.0
    """Of a call, whatever it is given."""
    row_s: Seconds = 0.0
    """Of a row."""
    token_s: Seconds = 0.0
    """Of a token, prompts included."""

    def seconds(self, rows: int, tokens: float) -> float:
        """Of one call."""
        return self.call_s + rows * self.row_s + tokens * self.token_s


class TrainerTimes(Section):
    """The trainer, all its ranks."""

    token_s: Seconds
    """Of a token, prompts included, on one of `ranks` ranks: forward and backward."""
    ranks: int = Field(1, ge=1)
    """Ranks it had when `token_s` was measured."""
    scaling: float = Field(1.0, gt=0.0, le=2.0)
    """Exponent of how fast more ranks are: w ranks train w ** scaling times as much. 1 is ideal."""
    update_s: Seconds = 0.0
    """Of an optimizer update, beside its gradients."""
    step_s: Seconds = 0.0
    """Of a step beside its updates and its waits: acknowledging rows, the controller."""

    def rank_token_s(self, ranks: int) -> float:
        """Of a token on one of so many ranks."""
        slower: float = (ranks / self.ranks) ** (1.0 - self.scaling)
        return self.token_s * slower


class WeightTimes(Section):
    """New weights, from the update that made them to where they serve."""

    export_s: Seconds = 0.0
    """Until they are published."""
    stage_s: Seconds = 0.0
    """Until a replica has taken them in."""
    commit_s: Seconds = 0.0
    """Until they serve, not counting running responses that are waited for."""


class Times(Section):
    """Of a whole run."""

    lengths: Lengths
    rollout: RolloutTimes
    stages: dict[str, StageTimes] = Field({})
    trainer: TrainerTimes
    weights: WeightTimes = WeightTimes()
