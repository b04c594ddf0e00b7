"""Files, prompts and overrides that are no configuration, and what `doctor` says of sound ones."""

import json

import pytest

from .conftest import BASE

FILES = [
    pytest.param("name: [1, 2\nout: x\n", ":2: ", id="list that does not end"),
    pytest.param("name: a\n  out: b\n", ":2: ", id="wrong indent"),
    pytest.param("name: a\n\tout: b\n", ":2: ", id="tab"),
    pytest.param("name: a\nseed: 1\nname: b\n", ':3: found duplicate key "name"', id="key twice"),
    pytest.param(
        "loss: {plugin: a, plugin: b}\n", ':1: found duplicate key "plugin"', id="nested key twice"
    ),
    pytest.param("", ":1: a configuration is a mapping of sections, got None", id="empty"),
    pytest.param("- 1\n", ":1: a configuration is a mapping of sections, got [1]", id="list"),
    pytest.param("just text\n", ":1: a configuration is a mapping", id="text"),
    pytest.param(
        "a: 1\n---\nb: 2\n",
        ":2: expected a single document in the stream, but f",
        id="two documents",
    ),
    pytest.param("a: 1\nb: {c: !x y}\n", ":2: tags are not read, got !x; write the", id="tag"),
    pytest.param("a: !!str 1\n", ":1: tags are not read, got !!str; write the pl", id="known tag"),
    pytest.param(
        "!!python/object:a.B {}\n", ":1: tags are not read, got !!python/o", id="root tag"
    ),
    pytest.param("a: *nothing\n", ":1: found undefined alias 'nothing'", id="alias"),
]


@pytest.mark.parametrize(("text", "expected"), FILES)
def test_doctor_file_that_is_no_configuration_names_the_line(text, expected, write, command):
    path = write(text)
    status, out, _ = command("doctor", path)
    assert status == 2
    assert out.startswith(f"1 fault(s):\n  {path}{expected}")


def test_doctor_file_that_cannot_be_read_says_why(folder, command):
    status, out, _ = command("doctor", folder / "none.yaml")
    assert status == 2
    assert f"cannot read the configuration '{folder}/none.yaml': No such file" in out
    status, out, _ = command("doctor", folder)
    assert status == 2
    assert "Is a directory" in out
    (folder / "binary.yaml").write_bytes(b"\xff\xfe")
    status, out, _ = command("doctor", folder / "binary.yaml")
    assert status == 2
    assert "can't decode" in out


def test_doctor_python_tag_in_yaml_runs_nothing(folder, write, command):
    victim = folder / "victim"
    path = write(BASE + f'seed: !!python/object/apply:os.mkdir ["{victim}"]\n')
    status, out, _ = command("doctor", path)
    assert status == 2
    line = BASE.count("\n") + 1
    assert f"{path}:{line}: tags are not read, got !!python/object/apply:os.mkdir; write the" in out
    assert not victim.exists()


def test_doctor_file_with_tags_names_each_line(write, command):
    path = write("a: !x 1\nb:\n  - !!python/name:os.system\n")
    status, out, _ = command("doctor", path)
    assert (status, out.splitlines()[0]) == (2, "2 fault(s):")
    assert f"{path}:1: tags are not read, got !x;" in out
    assert f"{path}:3: tags are not read, got !!python/name:os.system;" in out


def test_doctor_merged_keys_point_to_where_they_are_merged(write, command):
    shared = "loss: &loss {plugin: tabular_ppo_clip, optoins: {}}\n"
    text = BASE.replace("loss: {plugin: tabular_ppo_clip}\n", shared)
    text += "data_store: {<<: *loss, plugin: memory}\n"
    status, out, _ = command("doctor", write(text))
    assert status == 2
    assert ":12: loss.optoins: unknown key; did you mean 'options'?" in out
    assert ":19: data_store.optoins: unknown key; did you mean 'options'?" in out


PROMPT_FILES = [
    pytest.param("", [": the file has no prompts"], id="empty"),
    pytest.param("\n \n", [": the file has no prompts"], id="blank lines"),
    pytest.param(
        '{"prompt": "a", "answer": "b"}\n{"prompt": \n\n{"prompt": "c"}\n',
        [":2: malformed JSON at column", ":4: the fields are [], at "],
        id="malformed and another shape",
    ),
    pytest.param(
        '{"answer": "b"}\n[1]\n{"prompt": ""}\n{"prompt": "a", "reward": 1}\n{"prompt": 3}\n',
        [
            ":1: no field 'prompt' (there are: ['answer'])",
            ":2: an object is expected, got list",
            ":3: the field 'prompt' is empty",
            ":4: the field 'reward' is a column of AsyncFlow's own; rename it",
            ":5: the field 'prompt' is int, not text or messages",
        ],
        id="every line another",
    ),
]


@pytest.mark.parametrize(("content", "expected"), PROMPT_FILES)
def test_doctor_prompt_file_faults_come_with_their_lines(content, expected, folder, write, command):
    (folder / "prompts.jsonl").write_text(content)
    status, out, _ = command("doctor", write())
    assert status == 2
    assert out.startswith(f"{len(expected)} fault(s):")
    for fault in expected:
        assert f"prompts.options: {folder}/prompts.jsonl{fault}" in out


OVERRIDES = [
    ("workflow.max_staleness", "override 'workflow.max_staleness' is not of the form section.key="),
    ("=1", "is not of the form section.key=value"),
    ("a..b=1", "is not of the form section.key=value"),
    (".a=1", "is not of the form section.key=value"),
    ("seed=[1", "override 'seed=[1': the value is not YAML; quote it"),
    ("seed=!!int", "override 'seed=!!int': tags are not read, got !!int; write the plain value"),
    (
        "name=2026-11-30",
        "override: name: YAML takes it for the date 2026-11-30; put it in quotes",
    ),
    ("evaluation=false", "limit, samples, share, success, or null for none, got False"),
    ("checkpoint=false", "a section is a mapping with keys of every, keep, resume, got False"),
    ("steps=1", "override: steps: unknown key here; did you mean 'workflow.steps'?"),
    ("workflow.seed=1", "override: workflow.seed: unknown key here; did you mean 'seed'?"),
    ("rollout.top_p=1", "unknown key here; did you mean 'rollout.sampling.top_p'?"),
    ("workflow.every=1", "did you mean 'evaluation.every' or 'checkpoint.every'?"),
    ("stages.reward.function=my_reward.py:right", "without .py; did you mean 'my_reward:right'?"),
    ("stages.reward.function=./my_reward.py:right", "without .py; did you mean 'my_reward:right'?"),
    ("stages.reward.function=my_reward:rihgt", "did you mean 'my_reward:right'?"),
    (
        "stages.reward.function=my_reward:none",
        "the functions there are right, typo, stars, nothing",
    ),
    ("workflow.max_stalenes=1", "override: workflow.max_stalenes: unknown key; did you mean"),
    ("workflow.steps=many", "override: workflow.steps: "),
    ("wrkflow.steps=1", "override: wrkflow: unknown key; did you mean 'workflow'?"),
    ("name.first=x", "override name.first: name is 'mine', it has no keys"),
    ("workflow=3", "override: workflow: "),
    ("workflow.preset=sequential workflow.max_staleness=2", "config.yaml:16 with an override: wor"),
    ("prompts.options.path=none", "config.yaml:4 with an override: prompts.options: "),
    ("workflow.updates_per_step=3", "config.yaml:16 with an override: workflow: groups_per_step"),
    ("rollout.plugin=tabulr", "override: rollout.plugin: no rollout plugin 'tabulr'"),
]


@pytest.mark.parametrize(("override", "expected"), OVERRIDES)
@pytest.mark.parametrize("verb", ["doctor", "run"])
def test_override_mistake_is_named(verb, override, expected, write, command, folder):
    status, out, err = command(verb, write(), *override.split(" "))
    assert status == 2
    assert expected in out + err
    assert not (folder / "runs").exists()


def test_overrides_all_their_mistakes_come_at_once(write, command):
    status, out, _ = command("doctor", write(), "nothing", "seed=[", "name=x")
    assert status == 2
    assert out.startswith("2 fault(s):")


def test_doctor_sound_configuration_starts_nothing_and_says_what_it_found(
    write, command, folder, no_start
):
    path = write()
    status, out, err = command("doctor", path)
    assert (status, err) == (0, "")
    assert out.endswith("no faults\n")
    assert "reward" in out
    assert not (folder / "runs").exists()
    status, out, _ = command("doctor", path, "--json", "workflow.max_staleness=0")
    report = json.loads(out)
    assert status == 0
    assert report["ok"] is True
    assert report["faults"] == []
    assert report["workflow"]["max_staleness"] == 0
    assert report["workflow"]["switch_mode"] == "drain"
    assert report["plugins"]["stages.advantage"]["distribution"] == "af-config"
    assert report["tasks"]["reward"]["reads"] == ["response_ids", "answer"]


def test_doctor_says_how_long_prompts_may_be_where_the_engine_tells(write, command):
    overrides = ("rollout={plugin: short, sampling: {max_new_tokens: 60}}",)
    status, out, _ = command("doctor", write(), *overrides)
    assert status == 0
    assert (
        "note: prompts may have 4 tokens: rollout takes 64, of which max_new_tokens are 60" in out
    )
    status, out, _ = command("doctor", write(), *overrides, "--json")
    assert json.loads(out)["notes"][0].startswith("prompts may have 4 tokens")
    assert "prompts may have" not in command("doctor", write())[1]


def test_doctor_several_updates_says_what_is_on_policy(write, command):
    overrides = ("workflow.max_staleness=0", "workflow.updates_per_step=2")
    status, out, _ = command("doctor", write(), *overrides)
    assert status == 0
    assert "only the first of a step's 2 updates is on-policy" in out
