"""Further models beside the trained one: a reference's log-probs, a judge's answers."""

from pathlib import Path

import pytest

from asyncflow_core import Flow
from asyncflow_core.errors import ConfigError

pytestmark = pytest.mark.multiproc

HERE = str(Path(__file__).parent)


def with_reference():
    return {
        "models__reference": {"plugin": "tabular", "kind": "trainer"},
        "stages__reference": {"model": "reference"},
    }


@pytest.fixture
def seen():
    """(prompt and response, behaviour log-prob, reference log-prob) of each row, in order."""
    return []


@pytest.fixture
def look(seen):
    reads = ["prompt_ids", "response_ids", "behaviour_logprobs", "ref_logprobs"]

    def stage(batch):
        for prompt, response, behaviour, reference in zip(*(batch[n] for n in reads), strict=True):
            row = (*prompt.tolist(), *response.tolist())
            seen.append((row, float(behaviour[0]), float(reference[0])))
        return {"looked": [0.0] * batch.rows}

    return {"function": stage, "reads": reads, "writes": ["looked"]}


@pytest.mark.parametrize("world_size", [1, 2])
def test_reference_keeps_the_first_weights_while_the_policy_moves(
    settings, monkeypatch, look, seen, world_size
):
    monkeypatch.setenv("PYTHONPATH", HERE)
    monkeypatch.syspath_prepend(HERE)
    flow = Flow(
        **settings(
            **with_reference(),
            models__reference__world_size=world_size,
            stages__look=look,
            evaluation=None,
            stages__reward__function="functions:low_letter",
            workflow__preset="sequential",
        )
    )
    list(flow.run())
    assert flow.summary.steps == 4
    rows = flow.summary.rows_trained // 4
    first, last = seen[:rows], seen[-rows:]
    assert [b for _, b, _ in first] == pytest.approx([r for _, _, r in first], abs=1e-5)
    assert [b for _, b, _ in last] != pytest.approx([r for _, _, r in last], abs=1e-3)
    of_row = {}
    for row, _, reference in seen:
        assert of_row.setdefault(row, reference) == pytest.approx(reference, abs=1e-6)


def test_reference_and_judge_in_processes(settings, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", HERE)
    monkeypatch.syspath_prepend(HERE)
    flow = Flow(
        **settings(
            **with_reference(),
            models__judge={
                "plugin": "tabular",
                "kind": "rollout",
                "sampling": {"max_new_tokens": 2},
            },
            stages__reference__workers=2,
            stages__judge={
                "model": "judge",
                "function": "functions:judged",
                "reads": ["response_ids"],
                "writes": ["verdict"],
            },
        )
    )
    list(flow.run())
    assert flow.summary.steps == 4
    logs = {path.name for path in (flow.folder / "logs").iterdir()}
    assert {"reference-0.log", "reference-1.log", "judge-0.log"} <= logs


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"stages__x": {"model": "referenze"}}, "did you mean 'reference'?"),
        ({"stages__reference__function": "functions:judged"}, "kind trainer: it takes no function"),
        ({"models__spare": {"plugin": "tabular"}}, "no stage uses the models \\['spare'\\]"),
        ({"models__reference__sampling": {"top_k": 1}}, "takes no sampling"),
        ({"models__reference__frozen": False}, "frozen"),
        ({"models__reference__plugin": "tabularr"}, "tabular"),
        ({"stages__reference__kind": "reward"}, "alone or has a `function` of kind columns"),
        ({"stages__reference__writes": ["a", "b"]}, "one column"),
    ],
)
def test_mistakes_are_named(inline, changes, fault):
    more = {"stages__reference__writes": ["y"], "stages__reference__reads": ["response_ids"]}
    extra = more if "stages__reference__function" in changes else {}
    with pytest.raises(ConfigError, match=fault):
        Flow(**inline(**with_reference(), **extra, **changes))
