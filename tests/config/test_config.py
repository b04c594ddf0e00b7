"""From defaults, a file, overrides and Python to one configuration."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow_core as af
from asyncflow_core.config import RunConfig, Section, StageConfig
from asyncflow_core.config_source import ConfigSource, dump_yaml, parse_override
from asyncflow_core.errors import ConfigError
from asyncflow_core.flow.running.folder import RunFolder

from .conftest import BASE


@pytest.fixture(autouse=True)
def _importable(folder, monkeypatch):
    """The command line adds the folder where it is started; Python has the script's."""
    monkeypatch.syspath_prepend(str(folder))


def right(response, answer):
    return float(response == answer)


def columns(batch):
    return {"extra": [0] * batch.rows}


def flow(path, **overrides):
    return af.Flow.from_config(path, {k.replace("__", "."): v for k, v in overrides.items()})


def test_config_defaults_below_file_below_overrides(write):
    config = flow(write()).config
    assert config.seed == 0  # a default
    assert config.evaluation is None  # the file, over a default
    assert config.workflow.steps == 2
    config = flow(write(), workflow__steps=7, seed=3, evaluation={"samples": 2}).config
    assert (config.workflow.steps, config.workflow.group_size, config.seed) == (7, 2, 3)
    assert (config.evaluation.samples, config.evaluation.limit) == (2, 1024)


def test_config_override_of_a_whole_section_replaces_it(write):
    config = flow(write(), rollout={"plugin": "tabular"}).config
    assert config.rollout.sampling.max_new_tokens == 256
    config = flow(write(), rollout={"plugin": "tabular"}, rollout__replicas=2).config
    assert config.rollout.replicas == 2


def test_config_section_without_its_plugin_keeps_the_default_one(write):
    text = BASE.replace("evaluation: null", "launcher: {options: {threads: 2}}")
    config = flow(write(text), data_store__options__capacity_rows=99).config
    assert (config.data_store.plugin, config.data_store.options) == (
        "memory",
        {"capacity_rows": 99},
    )
    assert (config.launcher.plugin, config.launcher.options) == ("local", {"threads": 2})


TYPED = [
    ("a=1", 1),
    ("a=-1.5", -1.5),
    ("a=1e-3", 1e-3),
    ("a=true", True),
    ("a=null", None),
    ("a=", None),
    ("a=text", "text"),
    ("a=yes", "yes"),  # as in a file: YAML 1.2
    ("a='1'", "1"),
    ("a=[0, 1]", [0, 1]),
    ("a={b: [x], c: 2}", {"b": ["x"], "c": 2}),
    ("a=b=c", "b=c"),
    ("a=1:30", "1:30"),
    ("a=/some/path", "/some/path"),
]


@pytest.mark.parametrize(("text", "value"), TYPED)
def test_override_value_is_typed_as_in_a_file(text, value, tmp_path):
    path, found = parse_override(text)
    assert path == "a"
    assert (found, type(found)) == (value, type(value))
    file = tmp_path / "c.yaml"
    file.write_text(f"a: {text.partition('=')[2]}\n")
    assert ConfigSource.from_file(file).tree == {"a": value}


def test_input_paths_are_relative_to_the_file_not_to_the_folder_of_the_command(
    write, folder, tmp_path, monkeypatch
):
    path = write(BASE.replace("  options: {slots: 4}", "  options: {slots: 4}\n  python: bin/py"))
    (folder / "bin").mkdir()
    (folder / "bin" / "py").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    found = flow(path)
    assert found.config.rollout.python == str(folder / "bin" / "py")
    assert found.config.prompts.options["path"] == str(folder / "prompts.jsonl")
    relative = flow(Path("user") / "config.yaml").config
    assert relative == found.config
    absolute = flow(path, prompts__options__path=str(folder / "prompts.jsonl")).config
    assert absolute == found.config


def test_resolved_config_in_the_run_folder_runs_the_same_again(write, folder):
    made = flow(write(), workflow__max_staleness=1, seed=5)
    run = RunFolder(made.config)
    again = flow(run.path / "config.yaml")
    assert again.config == made.config
    assert again.plan.tasks == made.plan.tasks
    assert {n: c.options for n, c in again.plan.chosen.items()} == {
        n: c.options for n, c in made.plan.chosen.items()
    }
    # What the run shares out stays free to be changed.
    assert flow(run.path / "config.yaml", workflow__max_staleness=2).config.workflow.bound == 2


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | texts
    | st.sampled_from(
        ["1e-3", "null", "~", "yes", "010", "0x1", "1_000", "12:30", "2020-01-01", ".5", "=", "<<"]
    )
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(texts, values, max_size=4))
@settings(max_examples=200, deadline=None)
def test_dump_yaml_any_plain_values_load_again_as_they_were(tmp_path_factory, tree):
    file = tmp_path_factory.getbasetemp() / "dumped.yaml"
    file.write_text(dump_yaml(tree), encoding="utf-8")
    if tree:
        found = ConfigSource.from_file(file).tree
        assert found == tree
        assert repr(found) == repr(tree)


def python_flow(folder, reward, extra, **more):
    return af.Flow(
        name="mine",
        out=str(folder / "runs"),
        tokenizer=af.use("characters", alphabet="abc"),
        prompts=af.use("jsonl", path="prompts.jsonl"),
        rollout=af.use("tabular", slots=4, sampling={"max_new_tokens": 1}),
        trainer=af.use("tabular", lr=1.0),
        loss=af.use("tabular_ppo_clip"),
        stages={
            "reward": af.reward(reward),
            "advantage": af.use("made_up", rows=32),
            "extra": extra,
        },
        workflow={"preset": "async", "steps": 2, "groups_per_step": 4, "group_size": 2},
        weight_sync=af.use("made_up"),
        evaluation=None,
        **more,
    )


def yaml_flow(write):
    return flow(
        write(
            BASE.replace("made_up}\nwork", "made_up, rows: 32}\nwork").replace(
                "workflow:",
                "  extra: {function: 'my_reward:columns', reads: [reward], writes: [extra]}\n"
                "workflow:",
            )
        )
    )


def test_flow_built_in_python_equals_the_yaml(write, folder):
    extra = af.stage("my_reward:columns", reads=["reward"], writes=["extra"])
    made = python_flow(folder, "my_reward:right", extra)
    written = yaml_flow(write)
    assert made.config == written.config
    assert made.plan.tasks == written.plan.tasks
    assert made.plan.switch_mode == written.plan.switch_mode


def test_flow_python_functions_stay_functions_and_dump_as_names(write, folder):
    extra = af.stage(columns, reads=["reward"], writes=["extra"])
    made = python_flow(folder, right, extra)
    stages = made.config.stages
    assert stages["reward"].function is right
    assert made.plan.tasks == yaml_flow(write).plan.tasks
    dumped = made.config.model_dump(mode="json")["stages"]
    assert dumped["reward"]["function"] == f"{__name__}:right"
    assert dumped["extra"]["function"] == f"{__name__}:columns"
    assert RunConfig.model_validate(made.config.model_dump(mode="json")).stages["reward"].kind == (
        "reward"
    )


def test_flow_sections_may_be_models_and_mappings(folder):
    extra = StageConfig(function=columns, reads=("reward",), writes=("extra",))
    with_model = python_flow(folder, right, extra)
    mapping = {"function": columns, "reads": ["reward"], "writes": ["extra"]}
    assert python_flow(folder, right, mapping).config == with_model.config


def test_flow_mistakes_in_python_come_at_once_without_a_file(folder):
    extra = af.stage(columns, reads=["nothing"], writes=["extra"])
    with pytest.raises(ConfigError) as found:
        python_flow(folder, 3, extra, evaluaton=None, launcher=af.use("lokal"))
    faults = "\n".join(found.value.faults)
    assert "evaluaton: unknown key; did you mean 'evaluation'?" in faults
    assert "stages.reward.function: input should be a valid string, got 3" in faults
    assert "launcher.plugin: no launcher plugin 'lokal'" in faults
    assert len(found.value.faults) == 3
    with pytest.raises(ConfigError, match=r"stages\.reward: a function becomes a stage by af\.rew"):
        af.Flow(stages={"reward": right})
    with pytest.raises(ConfigError, match=r"^stages\.extra: task 'extra' reads the column 'noth"):
        python_flow(folder, right, extra)
    with pytest.raises(ConfigError, match="stages is a mapping of name to section"):
        af.Flow(stages=[right])


def test_flow_lambda_as_reward_works_in_its_own_process(folder):
    extra = af.stage(columns, reads=["reward"], writes=["extra"])
    made = python_flow(folder, lambda response: 1.0, extra)
    assert made.plan.tasks["reward"].columns == ("response_ids",)


def _sections(model=RunConfig, seen=()):
    found = {model}
    for field in model.model_fields.values():
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, Section) and part not in seen:
                found |= _sections(part, (*seen, model))
    return found


def test_config_every_field_is_documented():
    for section in _sections():
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


def _with_plugin():
    """Of each section that names a plugin: how it is given, and what it has beside options."""
    for name, found in RunConfig.model_fields.items():
        kinds = [found.annotation, *getattr(found.annotation, "__args__", ())]
        for model in (kind for kind in kinds if isinstance(kind, type)):
            if issubclass(model, Section) and {"plugin", "options"} <= set(model.model_fields):
                yield name, model is not found.annotation, set(model.model_fields)


@pytest.mark.parametrize(("section", "named", "fields"), list(_with_plugin()))
def test_use_knows_the_fields_of_every_section_from_options_of_the_plugin(
    folder, section, named, fields
):
    wrong = object()
    made = af.use("nobody", **dict.fromkeys(fields - {"plugin", "options"}, wrong))
    with pytest.raises(ConfigError) as found:
        af.Flow(**{section: {"mine": made} if named else made})
    place = f"{section}.mine" if named else section
    for field in fields - {"plugin", "options"}:
        assert any(fault.startswith(f"{place}.{field}: ") for fault in found.value.faults), field
