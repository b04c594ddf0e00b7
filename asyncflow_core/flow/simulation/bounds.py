"""What no allocation can do better than: the analytical half of the cost model. Pure.

Each part alone, with everything it waits for there at once. A run comes near the largest of them
where it overlaps well, and never below.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from asyncflow_core.config import StageConfig
from asyncflow_core.flow.simulation.times import StageTimes, Times
from asyncflow_core.flow.simulation.workload import Allocation, Workload
from asyncflow_core.services.data_store import TaskSpec

__all__ = ["lower_bound", "lower_bounds"]


def lower_bound(
    work: Workload, allocation: Allocation, times: Times, lengths: Sequence[Sequence[int]]
) -> float:
    """Least wall seconds of a step, the mean over all batches of `lengths`."""
    return max(lower_bounds(work, allocation, times, lengths).values())


def lower_bounds(
    work: Workload, allocation: Allocation, times: Times, lengths: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Least seconds of a step by what takes them: each task, and the way of the longest response.

    Where nothing may run ahead, each includes bringing the new weights, and in the sequential
    preset there is only the sum.
    """
    config, flow = work.config, work.config.workflow
    size = flow.groups_per_step
    batches = [lengths[at : at + size] for at in range(0, len(lengths), size)]
    tokens = fmean(sum(map(sum, batch)) for batch in batches)
    longest = fmean(max(map(max, batch)) for batch in batches) * times.rollout.step_s(1)
    trained = tokens + round(times.lengths.prompt) * size * flow.group_size
    overlaps_export, overlaps_fetch = work.overlaps(allocation.ranks)
    train = times.trainer.step_s + flow.updates_per_step * times.trainer.update_s
    gradients = trained / allocation.ranks * times.trainer.rank_token_s(allocation.ranks)
    rate = times.rollout.rate(config.rollout.rows_in_flight)
    found = {"rollout": tokens / (allocation.replicas * rate)}
    specs = {task.name: task for task in work.tasks}
    for name, stage in config.stages.items():
        alone = _stage_s(
            stage,
            specs[name],
            times.stages.get(name, StageTimes()),
            rows=size * flow.group_size,
            samples=flow.group_size,
            tokens=trained,
        )
        found[name] = alone / allocation.workers.get(name, stage.workers)
    weights = times.weights
    way = (weights.export_s, weights.stage_s)
    weights_s = (max(way) if overlaps_fetch else sum(way)) + weights.commit_s
    answered = longest + times.rollout.row_s
    if flow.preset == "sequential":
        found["rollout"] = max(found["rollout"], answered)
        return {"all": sum(found.values()) + gradients + train + weights_s}
    found["train"] = gradients + train
    if flow.bound == 0:
        found = {name: seconds + weights_s for name, seconds in found.items()}
    elif not overlaps_export:
        found["train"] += weights.export_s
    found["longest"] = (weights_s + answered + train) / (flow.bound + 1)
    return found


def _stage_s(
    stage: StageConfig,
    task: TaskSpec,
    times: StageTimes,
    *,
    rows: int,
    samples: int,
    tokens: float,
) -> float:
    """Of one worker alone, in calls as large as they may be."""
    most = max(stage.rows, samples) if task.whole_groups else stage.rows
    return rows / most * times.call_s + times.seconds(rows, tokens) - times.call_s
