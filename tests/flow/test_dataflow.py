"""Faults of the dataflow that columns imply."""

import graphlib

from hypothesis import given
from hypothesis import strategies as st

from asyncflow_core.flow.planning.dataflow import dataflow_faults
from asyncflow_core.services.data_store import TaskSpec

PROMPT = ("prompt_ids", "answer")
BOTH = ("train", "eval")


def messages(tasks, prompt=PROMPT):
    return [fault.message for fault in dataflow_faults(tasks, prompt)]


def test_dataflow_sound_has_no_faults():
    tasks = [
        TaskSpec("rollout", ("prompt_ids",), ("response_ids",), partitions=BOTH),
        TaskSpec("reward", ("response_ids", "answer"), ("reward",), partitions=BOTH),
        TaskSpec("advantage", ("reward",), ("advantages",)),
        TaskSpec("train", ("advantages",)),
    ]
    assert messages(tasks) == []


def test_dataflow_two_writers_are_both_named():
    tasks = [TaskSpec("one", (), ("reward",)), TaskSpec("two", (), ("reward",))]
    (fault,) = dataflow_faults(tasks, PROMPT)
    assert fault.message == "column 'reward' has 2 writers, one is allowed: 'one', 'two'"
    assert fault.task == "two"


def test_dataflow_column_of_the_prompts_written_again_is_a_fault():
    (fault,) = dataflow_faults([TaskSpec("one", (), ("answer",))], PROMPT)
    assert "is written by 'one', but prompts bring it" in fault.message


def test_dataflow_unwritten_column_names_task_and_what_there_is():
    (fault,) = dataflow_faults([TaskSpec("reward", ("anwser",), ("reward",))], PROMPT)
    assert fault.task == "reward"
    assert "reads the column 'anwser', which nobody writes" in fault.message
    assert "did you mean 'answer'?" in fault.message
    (fault,) = dataflow_faults([TaskSpec("reward", ("zzz",), ("reward",))], PROMPT)
    assert "(there are: answer, prompt_ids, reward)" in fault.message


def test_dataflow_column_written_for_train_only_is_not_there_for_eval():
    tasks = [TaskSpec("one", (), ("a",)), TaskSpec("two", ("a",), partitions=BOTH)]
    (fault,) = messages(tasks)
    assert "'two' reads 'a' on ['eval'] rows, but 'one' writes it only on ['train'] rows" in fault


def test_dataflow_cycle_names_only_its_tasks():
    tasks = [
        TaskSpec("a", ("z",), ("x",)),
        TaskSpec("b", ("x",), ("y",)),
        TaskSpec("c", ("y",), ("z",)),
        TaskSpec("before", ("prompt_ids",), ("w",)),
        TaskSpec("after", ("y", "w"), ("v",)),
        TaskSpec("last", ("v",)),
    ]
    assert messages(tasks) == ["tasks 'a', 'b', 'c' wait for each other's columns"]
    assert messages([TaskSpec("self", ("x",), ("x",))]) == [
        "tasks 'self' wait for each other's columns"
    ]


def test_dataflow_all_faults_come_at_once():
    tasks = [
        TaskSpec("one", ("nothing",), ("a",)),
        TaskSpec("two", ("also_nothing",), ("a",)),
    ]
    assert len(messages(tasks)) == 3


@given(st.lists(st.tuples(st.sets(st.integers(0, 5), max_size=3)), min_size=1, max_size=6))
def test_dataflow_one_writer_each_is_sound_exactly_without_a_cycle(reads):
    tasks = [
        TaskSpec(f"t{n}", tuple(f"c{m}" for m in sorted(found) if m < len(reads)), (f"c{n}",))
        for n, (found,) in enumerate(reads)
    ]
    graph = {task.name: [f"t{c[1:]}" for c in task.reads] for task in tasks}
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
        sound = True
    except graphlib.CycleError:
        sound = False
    assert (messages(tasks, ()) == []) is sound
