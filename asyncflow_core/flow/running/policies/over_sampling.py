"""Over-sampling: a batch starts more groups than it trains; the last ones are stopped early. Pure.

The step does not wait for the slowest responses, and for that it never trains them: **the trained
lengths are shorter than the data's**, and prompts that need long answers are trained less. It is
for throughput at that price, and a run with it says so when it starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from asyncflow_core.batch import GroupKey, Key

__all__ = ["BIASED", "STRAGGLER", "OverSampling"]

STRAGGLER = "straggler"
"""The reason that groups are dropped with."""

BIASED = (
    "workflow.extra_groups stops the slowest groups of each batch: what is trained is shorter than "
    "what the prompts call for, and long answers are learnt less; 0 trains them all"
)
"""Said when a run starts."""


class OverSampling:
    """Says which groups of a trained batch are to be stopped, and counts.

    Attributes:
        started: groups that a batch starts.
        groups, rows: stopped.
    """

    claims_lengths: ClassVar[bool] = False

    def __init__(self, *, groups_per_step: int, extra_groups: int, group_size: int) -> None:
        """A batch starts `groups_per_step + extra_groups` groups and trains the first."""
        self.started = groups_per_step + extra_groups
        self._group_size = group_size
        self.groups = self.rows = 0

    def stragglers(self, admitted: Sequence[GroupKey], trained: Iterable[GroupKey]) -> list[Key]:
        """Rows to be stopped once a batch is trained.

        Args:
            admitted: groups of the batch that were not dropped.
            trained: those that its step trained.
        """
        done = set(trained)
        late = [group for group in admitted if group not in done]
        self.groups += len(late)
        self.rows += len(late) * self._group_size
        return [Key(*group, sample) for group in late for sample in range(self._group_size)]
