"""How long a batch's prompts may wait after they might have started. Pure.

A prompt that starts the moment the bound on staleness allows it makes samples as old as the bound,
even where rollout is fast enough to wait for newer weights. So its start is put off, as long as the
batch's last row still comes a quarter of a step before the trainer begins with the batch. The delay
grows slowly, by what was seen a few steps ago, and falls at once when the trainer had to wait.
"""

from __future__ import annotations

__all__ = ["Pacing"]

_MARGIN = 0.25
"""Share of a step by which a batch's last row should come before the trainer begins with it."""
_GAIN = 0.5
"""Of the slack above the margin, what is added to the delay, shared by the batches under way."""
_WAITED = 0.02
"""Share of a step that a trainer may wait for rows without being short of them."""


class Pacing:
    """The delay of the batches to come.

    Attributes:
        delay_s: seconds from the version that lets a batch start to its start.
    """

    def __init__(self, max_staleness: int) -> None:
        """No delay; `max_staleness` in versions."""
        self._max_staleness = max_staleness
        self.delay_s = 0.0

    def stepped(self, *, slack_s: float, waited_s: float, step_s: float) -> None:
        """A step was done.

        Args:
            slack_s: from the last row of its batch to its beginning; negative if that came later.
            waited_s: what the trainer waited for rows in it.
            step_s: of the whole step.
        """
        spare = slack_s - _MARGIN * step_s
        if waited_s > _WAITED * step_s:
            change = -max(waited_s, -spare)
        elif spare < 0:
            change = _GAIN * spare
        else:
            change = _GAIN / (1 + self._max_staleness) * spare
        self.delay_s = min(max(0.0, self.delay_s + change), self._max_staleness * step_s)
