"""The order of tasks that take turns, over random dataflows."""

from hypothesis import given
from hypothesis import strategies as st

from asyncflow_core.flow.planning.dataflow import dataflow_faults
from asyncflow_core.flow.planning.turns import in_turns
from asyncflow_core.services.data_store import TaskSpec

BOTH = ("train", "eval")
ROLLOUT = TaskSpec("rollout", ("prompt",), ("response",), partitions=BOTH)


@st.composite
def dataflows(draw):
    """Rollout, stages in any order of definition, and a trainer."""
    stages, wide = [], ["prompt", "response"]
    columns = list(wide)
    for number in range(draw(st.integers(0, 6))):
        held_out = draw(st.booleans())
        reads = draw(st.sets(st.sampled_from(wide if held_out else columns), min_size=1))
        written = [f"c{number}.{n}" for n in range(draw(st.integers(0, 2)))]
        name = draw(st.sampled_from("abcdef")) + str(number)
        partitions = BOTH if held_out else draw(st.sampled_from([("train",), ("eval",)]))
        if partitions == ("eval",):
            reads &= set(wide)
            if not reads:
                continue
        stages.append(TaskSpec(name, tuple(sorted(reads)), tuple(written), partitions=partitions))
        if partitions != ("eval",):
            columns += written
        if held_out:
            wide += written
    reads = draw(st.sets(st.sampled_from(columns)))
    train = TaskSpec("train", ("response", *sorted(reads - {"response"})))
    return [ROLLOUT, *draw(st.permutations(stages)), train]


@given(dataflows())
def test_in_turns_each_waits_for_all_of_the_one_before(tasks):
    assert dataflow_faults(tasks, ["prompt"]) == []
    made = in_turns(tasks, 4)
    assert dataflow_faults(made, ["prompt"]) == []  # held-out rows wait for nothing that never is
    assert sorted(task.name for task in made) == sorted(task.name for task in tasks)
    assert made[0] is tasks[0]
    assert made[-1].name == "train"
    before = made[0]
    for task in made[1:]:
        if "train" not in task.partitions:
            assert task in tasks
            continue
        assert set(task.reads) & set(before.writes)
        assert (task.whole_groups, task.batch_groups) == (True, 4)
        before = task if task.writes else before


@given(dataflows())
def test_in_turns_only_adds_columns_that_are_waited_for(tasks):
    given_tasks = {task.name: task for task in tasks}
    for task in in_turns(tasks, 4):
        old = given_tasks[task.name]
        assert task.reads[: len(old.reads)] == old.reads
        assert len(task.reads) <= len(old.reads) + 1
        assert task.writes == old.writes
        assert task.partitions == old.partitions


def test_in_turns_goes_by_dataflow_then_held_out_then_name():
    stages = [
        TaskSpec("advantage", ("reward",), ("advantages",)),
        TaskSpec("reference", ("response",), ("ref",)),
        TaskSpec("reward", ("response",), ("reward",), partitions=BOTH),
        TaskSpec("critic", ("response",), ("values",)),
    ]
    made = in_turns([ROLLOUT, *stages, TaskSpec("train", ("advantages",))], 8)
    names = [task.name for task in made]
    assert names == ["rollout", "reward", "advantage", "critic", "reference", "train"]
