"""Metric names, in one place: `role/name_unit`. `docs/metrics.md` lists each with its meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

__all__ = [
    "CHECKPOINT_SAVE_S",
    "EVAL_NEWEST_VERSION",
    "EVAL_OLDEST_VERSION",
    "EVAL_REWARD_MEAN",
    "EVAL_ROWS",
    "EVAL_ROWS_DROPPED",
    "EVAL_SCORE",
    "EVAL_VERSION",
    "EVAL_WALL_S",
    "PACING_DELAY_S",
    "RESPONSE_TOKENS_MEAN",
    "RESTARTS",
    "REWARD_ERRORS",
    "REWARD_MEAN",
    "REWARD_STD",
    "ROLLOUT_TOKENS_DIED",
    "ROLLOUT_TOKENS_KEPT",
    "ROLLOUT_TOKENS_LOST",
    "STALENESS_MAX",
    "STALENESS_MEAN",
    "STALENESS_UPDATES_MAX",
    "STEP_WALL_S",
    "TOKENS_PER_S",
    "TRAINER_BEHAVIOUR_KL",
    "TRAINER_BUSY_S",
    "TRAINER_CLIP_SHARE",
    "TRAINER_GRAD_NORM",
    "TRAINER_LOSS",
    "TRAINER_LR",
    "TRAINER_TOKENS",
    "TRAINER_WAIT_S",
    "WEIGHTS_BYTES",
    "WEIGHTS_COMMIT_S",
    "WEIGHTS_COMPARED",
    "WEIGHTS_FAILURES",
    "WEIGHTS_PUBLISH_S",
    "WEIGHTS_STAGE_S",
    "Means",
]

REWARD_MEAN: Final = "reward/mean"
REWARD_STD: Final = "reward/std"
REWARD_ERRORS: Final = "reward/errors"
RESPONSE_TOKENS_MEAN: Final = "rollout/response_tokens_mean"
ROLLOUT_TOKENS_KEPT: Final = "rollout/tokens_kept"
ROLLOUT_TOKENS_LOST: Final = "rollout/tokens_lost"
ROLLOUT_TOKENS_DIED: Final = "rollout/tokens_died"
RESTARTS: Final = "flow/restarts"
TOKENS_PER_S: Final = "flow/tokens_per_s"
PACING_DELAY_S: Final = "flow/pacing_delay_s"
STEP_WALL_S: Final = "flow/step_wall_s"
STALENESS_MEAN: Final = "staleness/mean"
STALENESS_MAX: Final = "staleness/max"
STALENESS_UPDATES_MAX: Final = "staleness/updates_max"
TRAINER_LOSS: Final = "trainer/loss"
TRAINER_CLIP_SHARE: Final = "trainer/clip_share"
TRAINER_BEHAVIOUR_KL: Final = "trainer/behaviour_kl"
TRAINER_GRAD_NORM: Final = "trainer/grad_norm"
TRAINER_LR: Final = "trainer/lr"
TRAINER_WAIT_S: Final = "trainer/wait_s"
TRAINER_BUSY_S: Final = "trainer/busy_s"
TRAINER_TOKENS: Final = "trainer/tokens"
WEIGHTS_PUBLISH_S: Final = "weights/publish_s"
WEIGHTS_STAGE_S: Final = "weights/stage_s"
WEIGHTS_COMMIT_S: Final = "weights/commit_s"
WEIGHTS_FAILURES: Final = "weights/failures"
WEIGHTS_COMPARED: Final = "weights/compared"
WEIGHTS_BYTES: Final = "weights/bytes"
CHECKPOINT_SAVE_S: Final = "checkpoint/save_s"
EVAL_SCORE: Final = "eval/score"
EVAL_REWARD_MEAN: Final = "eval/reward_mean"
EVAL_VERSION: Final = "eval/version"
EVAL_OLDEST_VERSION: Final = "eval/oldest_version"
EVAL_NEWEST_VERSION: Final = "eval/newest_version"
EVAL_ROWS: Final = "eval/rows"
EVAL_ROWS_DROPPED: Final = "eval/rows_dropped"
EVAL_WALL_S: Final = "eval/wall_s"


class Means:
    """(sum, weight) pairs collected by name; means are taken late, over everything."""

    def __init__(self) -> None:
        """Start empty."""
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, pairs: Mapping[str, tuple[float, float]]) -> None:
        """Add one micro-batch's or rank's pairs."""
        for name, (total, weight) in pairs.items():
            old_total, old_weight = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (old_total + total, old_weight + weight)

    def pairs(self) -> dict[str, tuple[float, float]]:
        """What was collected, to be added elsewhere."""
        return dict(self._sums)

    def means(self, names: Iterable[str] | None = None) -> dict[str, float]:
        """Name to mean; names of weight 0 are left out."""
        chosen = self._sums if names is None else names
        return {
            name: self._sums[name][0] / self._sums[name][1]
            for name in chosen
            if name in self._sums and self._sums[name][1]
        }
