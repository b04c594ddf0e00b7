"""Dynamic sampling: groups whose rewards are all equal are thrown away and refilled. Pure.

Their advantages are zero, so they would take room in the batch and teach nothing (DAPO,
arXiv:2503.14476). The place of such a group goes to the source's next prompt, in its own batch, so
batches stay as large as they are, and the bound and the order stay what they are. Since the batch
waits for the refill, whatever its length, no length is favoured; where rewards go with lengths, the
prompts that are left may be longer or shorter than the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

__all__ = ["ALL_EQUAL", "DynamicSampling"]

ALL_EQUAL = "all rewards equal"
"""The reason that groups are dropped with."""


class DynamicSampling:
    """Judges whole groups and counts.

    Attributes:
        groups, rows, tokens: thrown away; response tokens.
        kept: groups that were not.
    """

    claims_lengths: ClassVar[bool] = True

    def __init__(self) -> None:
        """Nothing judged."""
        self.groups = self.rows = self.tokens = self.kept = 0

    def keep(self, rewards: Sequence[float], tokens: int) -> bool:
        """Whether a group is trained.

        Args:
            rewards: of its rows; one alone teaches nothing either.
            tokens: response tokens of all of them.
        """
        if max(rewards) > min(rewards):
            self.kept += 1
            return True
        self.groups += 1
        self.rows += len(rewards)
        self.tokens += tokens
        return False
