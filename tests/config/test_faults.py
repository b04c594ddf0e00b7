"""Every mistake a user can make, and what is said about it: all at once, with its place."""

import json

import pytest

from .conftest import BASE


def case(name, edits, *expected, faults=None):
    """Edits of the sound configuration; each expected fault is (text of its line, fragments)."""
    return pytest.param(edits, expected, len(expected) if faults is None else faults, id=name)


ROLLOUT = BASE[BASE.index("rollout:") : BASE.index("trainer:")]

CASES = [
    # Keys and types
    case(
        "misspelt key",
        [("preset: async,", "preset: async, max_stalenes: 1,")],
        ("workflow:", "workflow.max_stalenes: unknown key; did you mean 'max_staleness'?"),
    ),
    case(
        "misspelt section",
        [("evaluation: null", "evaluaton: null")],
        ("evaluaton", "evaluaton: unknown key; did you mean 'evaluation'?"),
    ),
    case(
        "misspelt nested key",
        [("max_new_tokens: 1", "max_new_token: 1")],
        ("max_new_token", "rollout.sampling.max_new_token: unknown key; did you mean 'max_new_tok"),
    ),
    case(
        "misspelt option",
        [("{lr: 1.0}", "{learning: 1.0}")],
        ("learning", "trainer.options.learning: unknown key", "keys here are", "lr"),
    ),
    case(
        "misspelt stage key",
        [("kind: reward", "kid: reward")],
        ("kid", "stages.reward.kid: unknown key; did you mean 'kind'?"),
    ),
    case(
        "key that is a number",
        [("evaluation: null", "evaluation: null\n7: 8")],
        ("7: 8", "7", "key"),
    ),
    case(
        "missing section",
        [("loss: {plugin: tabular_ppo_clip}\n", "")],
        (None, "loss: required, and missing"),
    ),
    case(
        "missing field",
        [("steps: 2, ", "")],
        ("workflow:", "workflow.steps: required, and missing"),
    ),
    case(
        "plugin left out",
        [("loss: {plugin: tabular_ppo_clip}", "loss: {}")],
        ("loss:", "loss.plugin: required, and missing"),
    ),
    case("wrong number", [("steps: 2", "steps: two")], ("steps", "workflow.steps:", "'two'")),
    case("number too small", [("steps: 2", "steps: 0")], ("steps", "greater than or equal to 1")),
    case(
        "section is a word",
        [(ROLLOUT, "rollout: tabular\n")],
        ("rollout:", "rollout:", "'tabular'"),
    ),
    case(
        "section is a list", [("loss: {plugin: tabular_ppo_clip}", "loss: [1]")], ("loss:", "[1]")
    ),
    case("section is empty", [("loss: {plugin: tabular_ppo_clip}", "loss:")], ("loss:", "None")),
    case(
        "options are a word",
        [("{lr: 1.0}", "fast")],
        ("options: fast", "trainer.options:", "'fast'"),
    ),
    case(
        "options are a list",
        [("{lr: 1.0}", "[1]")],
        ("options: [1]", "trainer.options:", "[1]"),
    ),
    case(
        "plugin is a number",
        [("plugin: made_up}\nworkflow", "plugin: 3}\nworkflow")],
        ("advantage", "stages.advantage.plugin:", "string"),
    ),
    case(
        "stages are a list",
        [("  reward: {function", "  - {function"), ("  advantage:", "  - ")],
        ("stages", "stages:", "dictionary"),
    ),
    case(
        "a stage is a word",
        [("advantage: {plugin: made_up}", "advantage: made_up")],
        ("advantage", "stages.advantage:", "'made_up'"),
    ),
    case(
        "function is a number",
        [('"my_reward:right"', "3")],
        ("reward", "stages.reward.function: input should be a valid string, got 3; or "),
    ),
    case(
        "option of a wrong type",
        [("{slots: 4}", "{slots: many}")],
        ("slots", "rollout.options.slots:", "'many'"),
    ),
    case(
        "name is no folder name", [("name: mine", "name: ../mine")], ("name", "name:", "'../mine'")
    ),
    case(
        "seed too large",
        [("evaluation: null", f"evaluation: null\nseed: {2**64}")],
        ("seed", "seed:", "less than"),
    ),
    case(
        "model in two shapes",
        [("{slots: 4}", "{slots: 4, model: [1]}")],
        ("slots", "rollout.options.model: unknown key"),
    ),
    case(
        "section of a plugin is a word",
        [(ROLLOUT, "rollout: tabular\n")],
        ("rollout:", "rollout: a section is a mapping that names its plugin, as {plugin: tabular}"),
    ),
    case(
        "section without a plugin is a word",
        [(BASE[BASE.index("workflow:") : BASE.index("weight_sync:")], "workflow: async\n")],
        ("workflow:", "workflow: a section is a mapping with keys of", "steps", "got 'async'"),
    ),
    case(
        "a stage is a function's name",
        [('{function: "my_reward:right", kind: reward}', '"my_reward:right"')],
        ("reward:", "stages.reward:", "as {function: 'my_reward:right', kind: reward}, got"),
    ),
    case(
        "option beside options",
        [("  options: {slots: 4}", "  slots: 4")],
        ("slots", "rollout.slots: unknown key; keys here are", "plugin's own stands in `options`"),
    ),
    case(
        "options misspelt",
        [("  options: {slots: 4}", "  option: {slots: 4}")],
        ("option:", "rollout.option: unknown key; did you mean 'options'?"),
    ),
    case(
        "key of the section among the options",
        [("{slots: 4}", "{replicas: 2}")],
        ("replicas", "rollout.options.replicas: unknown key", "no option", "but rollout.replicas"),
    ),
    case(
        "key of a stage among its options",
        [("advantage: {plugin: made_up}", "advantage: {plugin: made_up, options: {workers: 2}}")],
        ("advantage", "stages.advantage.options.workers: unknown", "but stages.advantage.workers"),
    ),
    case(
        "sampling among the options",
        [("{slots: 4}", "{temperature: 0.5}")],
        ("temperature", "rollout.options.temperature:", "but rollout.sampling.temperature"),
    ),
    # Plugins
    case(
        "unknown plugin with a near name",
        [("plugin: tabular\n  options: {lr", "plugin: tabulr\n  options: {lr")],
        ("tabulr", "trainer.plugin: no trainer plugin 'tabulr' (installed: ", "'tabular'?"),
    ),
    case(
        "unknown plugin of a project's distribution",
        [("plugin: tabular\n  options: {lr", "plugin: hzp\n  options: {lr")],
        ("hzp", "trainer.plugin: no trainer plugin 'hzp'", "try: pip install asyncflow-hzp"),
    ),
    case(
        "unknown plugin near a project's distribution",
        [("plugin: tabular\n  options: {slots: 4}", "plugin: transfomers")],
        ("transfomers", "did you mean 'transformers'?; try: pip install asyncflow-transformers"),
    ),
    case(
        "unknown stage plugin",
        [("{plugin: made_up}\nwork", "{plugin: mdae_up}\nwork")],
        ("mdae_up", "stages.advantage.plugin: no stage plugin 'mdae_up'", "'made_up'"),
    ),
    case(
        "plugin that raises on import",
        [("plugin: tabular\n  options: {slots: 4}", "plugin: broken")],
        (
            "broken",
            "rollout plugin 'broken' of af-broken 1.0 failed on import of af_config_broken: "
            "ModuleNotFoundError: No module named 'this_module_is_not_there'",
        ),
    ),
    case(
        "plugin that is declared and not registered",
        [("{plugin: made_up}\nwork", "{plugin: forgotten}\nwork")],
        ("forgotten", "declares the entry point 'stage.forgotten', but"),
    ),
    case(
        "plugin without a contract",
        [("{plugin: made_up}\nwork", "{plugin: no_contract}\nwork")],
        ("no_contract", "stages.advantage.plugin: stage.no_contract of af-config declares no cont"),
    ),
    case(
        "plugin whose contract fails",
        [("{plugin: made_up}\nwork", "{plugin: bad_contract}\nwork")],
        ("bad_contract", "stage.bad_contract of af-config failed: ZeroDivisionError"),
    ),
    case(
        "plugin without its record",
        [("plugin: tabular\n  options: {slots: 4}", "plugin: no_record")],
        ("rollout:", "rollout.no_record of af-config is registered without RolloutCapabilities"),
    ),
    case(
        "plugin whose check fails",
        [("plugin: tabular\n  options: {slots: 4}", "plugin: bad_check")],
        ("rollout:", "rollout.bad_check of af-config failed: RuntimeError: the check fell over"),
    ),
    # Steps and staleness
    case(
        "batch that does not divide",
        [("group_size: 2}", "group_size: 2, updates_per_step: 3}")],
        ("workflow", "groups_per_step 4 does not divide into updates_per_step 3 equal shares"),
    ),
    case(
        "streaming with staleness",
        [("preset: async", "preset: streaming, max_staleness: 1")],
        ("workflow", "the streaming preset trains at staleness 0, max_staleness is 1"),
    ),
    case(
        "delayed with another staleness",
        [("preset: async", "preset: delayed, max_staleness: 2")],
        ("workflow", "the delayed preset trains at staleness 1, max_staleness is 2"),
    ),
    case(
        "sequential with staleness",
        [("preset: async", "preset: sequential, max_staleness: 1")],
        ("workflow", "the sequential preset trains at staleness 0, max_staleness is 1"),
    ),
    case(
        "staleness 0 in flight",
        [
            ("preset: async", "preset: async, max_staleness: 0"),
            ("  sampling:", "  switch_mode: in_flight\n  sampling:"),
        ],
        (None, "switch_mode in_flight mixes versions", "max_staleness 0 forbids"),
    ),
    case(
        "sequential in flight",
        [
            ("preset: async", "preset: sequential"),
            ("  sampling:", "  switch_mode: abort_resume\n  sampling:"),
        ],
        (None, "switch_mode abort_resume mixes versions"),
    ),
    case(
        "staleness negative",
        [("preset: async", "preset: async, max_staleness: -1")],
        ("workflow", "workflow.max_staleness:"),
    ),
    case(
        "preset unknown",
        [("preset: async", "preset: asynch")],
        ("workflow", "workflow.preset:", "'streaming', 'delayed' or 'async'", "'asynch'"),
    ),
    case(
        "store with a staleness of its own",
        [("evaluation: null", "data_store: {plugin: memory, options: {max_staleness: 3}}")],
        ("data_store", "data_store.options.max_staleness: it is the workflow's, 1"),
    ),
    case(
        "store too small for the open batches",
        [("evaluation: null", "data_store: {plugin: memory, options: {capacity_rows: 15}}")],
        (
            "data_store",
            "data_store.options.capacity_rows: the store holds 15 rows, but 2 batch(es)"
            " of 4 x 2 rows",
            "which take 16",
        ),
    ),
    case(
        "store too small for the groups that batches start beyond their own",
        [
            ("preset: async", "preset: async, extra_groups: 4"),
            ("evaluation: null", "data_store: {plugin: memory, options: {capacity_rows: 16}}"),
        ],
        (
            "data_store",
            "the store holds 16 rows, but 2 batch(es) of 8 x 2 rows may be open",
            "which take 32",
        ),
    ),
    case(
        "store too small in bytes",
        [
            ("max_new_tokens: 1", "max_new_tokens: 8192"),
            (
                "evaluation: null",
                "data_store: {plugin: memory, options: {capacity_bytes: 4000000}}",
            ),
        ],
        ("data_store", "capacity_bytes: the store holds 4000000 bytes"),
    ),
    # Capabilities
    case(
        "switch mode that the engine lacks",
        [("plugin: tabular\n  options: {slots: 4}", "plugin: plain\n  switch_mode: in_flight")],
        (
            "switch_mode",
            "rollout.switch_mode: rollout plugin 'plain' cannot in_flight; it can drain",
        ),
    ),
    case(
        "response longer than the engine takes",
        [
            ("plugin: tabular\n  options: {slots: 4}", "plugin: short"),
            ("max_new_tokens: 1", "max_new_tokens: 64"),
        ],
        (
            "max_new_tokens",
            "rollout.sampling.max_new_tokens: 64 tokens and a prompt of at least one are more than "
            "rollout plugin 'short' takes of this model, 64 tokens with the prompt; lower it",
        ),
    ),
    case(
        "sampling of a judge that its engine lacks, or is too long for it",
        [
            (
                "loss: {plugin: tabular_ppo_clip}",
                "loss: {plugin: tabular_ppo_clip}\n"
                "models:\n  judge: {plugin: short, kind: rollout,\n"
                "    sampling: {top_k: 3,\n      max_new_tokens: 70}}",
            ),
            (
                'reward: {function: "my_reward:right", kind: reward}',
                "reward: {model: judge, function: 'my_reward:plain', reads: [response_ids], "
                "writes: [reward]}",
            ),
        ],
        ("sampling: {top_k", "models.judge.sampling.top_k: rollout plugin 'short' does not honour"),
        ("max_new_tokens: 70", "models.judge.sampling.max_new_tokens: 70 tokens and a prompt of"),
    ),
    case(
        "sampling that the engine lacks",
        [
            ("plugin: tabular\n  options: {slots: 4}", "plugin: plain"),
            ("max_new_tokens: 1", "max_new_tokens: 1, stop: [x]"),
        ],
        (
            "stop",
            "rollout.sampling.stop: rollout plugin 'plain' does not honour stop; it takes max",
        ),
    ),
    case(
        "truncation that the trainer cannot mask",
        [("max_new_tokens: 1", "max_new_tokens: 1, top_p: 0.9")],
        ("top_p", "rollout.sampling: trainer plugin 'tabular' cannot mask truncated sampling"),
    ),
    case(
        "more ranks than the trainer takes",
        [
            ("plugin: tabular\n  options: {lr: 1.0}", "plugin: torchish\n  world_size: 3"),
            ("tabular_ppo_clip", "torchish"),
        ],
        ("world_size", "trainer.world_size: trainer plugin 'torchish' runs on at most 2 ranks"),
    ),
    case(
        "numpy loss for a torch trainer",
        [("plugin: tabular\n  options: {lr: 1.0}", "plugin: torchish")],
        (
            "tabular_ppo_clip",
            "loss.plugin: loss 'tabular_ppo_clip' works on numpy arrays, trainer "
            "plugin 'torchish' on torch",
        ),
    ),
    case(
        "loss that needs entropy",
        [("tabular_ppo_clip", "entropy")],
        ("loss", "loss 'entropy' asks for entropy, which trainer plugin 'tabular' does not give"),
    ),
    case(
        "weights that do not reach",
        [("weight_sync: {plugin: made_up}", "weight_sync: {plugin: memory}")],
        (
            "weight_sync",
            "'memory' reaches process, but launcher 'local' puts services a host apart",
        ),
    ),
    case(
        "weights that are not taken",
        [("plugin: tabular\n  options: {slots: 4}", "plugin: by_path")],
        ("weight_sync", "'made_up' hands over buckets, but rollout plugin 'by_path' takes path"),
    ),
    case(
        "one device for two services",
        [
            ("  sampling:", "  devices: [0]\n  sampling:"),
            ("{lr: 1.0}", "{lr: 1.0}\n  devices: [0]"),
        ],
        ("devices: [0]\nloss", "devices [0] are given to rollout and trainer"),
    ),
    case(
        "interpreter that is not there",
        [("  sampling:", "  python: /no/python\n  sampling:")],
        ("python", "rollout.python: there is no interpreter at '/no/python'"),
    ),
    # Files
    case(
        "model that is not there",
        [("out: OUT", "out: OUT\nmodel: weights/none")],
        ("model:", "model: there is no directory", "user/weights/none"),
        faults=2,
    ),
    case(
        "model that nobody takes",
        [("out: OUT", "out: OUT\nmodel: .")],
        ("model:", "model: no chosen plugin takes a model"),
    ),
    case(
        "prompts that are not there",
        [("path: prompts.jsonl", "path: none.jsonl")],
        ("none.jsonl", "prompts.options: ", "user/none.jsonl: No such file or directory"),
    ),
    # Stages and the dataflow
    case(
        "function that does not import",
        [("my_reward:right", "no_reward:right")],
        (
            "no_reward",
            "stages.reward.function: function 'no_reward:right' cannot be loaded: "
            "ModuleNotFoundError",
            "the folder where the command is started",
        ),
    ),
    case(
        "function that its module lacks",
        [("my_reward:right", "my_reward:wrong")],
        ("my_reward", "function 'my_reward:wrong' cannot be loaded: AttributeError"),
    ),
    case(
        "function that is no function",
        [("my_reward:right", "my_reward:NUMBER")],
        ("my_reward", "function 'my_reward:NUMBER' is of type int, it cannot be called"),
    ),
    case(
        "function without a name",
        [("my_reward:right", "my_reward")],
        ("my_reward", "function 'my_reward' is not of the form module:name"),
    ),
    case(
        "function without a module",
        [("my_reward:right", ":right")],
        (":right", "function ':right' is not of the form module:name"),
    ),
    case(
        "function of columns that does not import",
        [
            ("evaluation: null", "evaluation: null"),
            (
                "  advantage:",
                '  extra: {function: "no_reward:columns", writes: [extra]}\n  advantage:',
            ),
        ],
        ("extra", "stages.extra.function: function 'no_reward:columns' cannot be loaded"),
    ),
    case(
        "reward of any number of parameters",
        [("my_reward:right", "my_reward:stars")],
        ("my_reward", "stages.reward.function: a reward's parameters", "'stars' takes ['args']"),
    ),
    case(
        "reward without parameters",
        [("my_reward:right", "my_reward:nothing")],
        ("my_reward", "'nothing' takes none"),
    ),
    case(
        "reward whose parameters cannot be known",
        [("my_reward:right", "builtins:max")],
        ("builtins", "a reward's parameters must be known"),
    ),
    case(
        "reward that is async",
        [("my_reward:right", "my_reward:later")],
        ("my_reward", "function 'later' is async, and a stage awaits nothing; give a plain"),
    ),
    case(
        "reward with the parameter of a column nobody writes",
        [("my_reward:right", "my_reward:typo")],
        (
            "my_reward",
            "stages.reward: task 'reward' reads the column 'anwser', which nobody writes",
            "did you mean 'answer'?",
        ),
    ),
    case(
        "loss that reads a column nobody writes",
        [("tabular_ppo_clip", "reference")],
        ("reference", "loss.plugin: task 'train' reads the column 'ref_logprobs', which nobody"),
    ),
    case(
        "no reward at all",
        [('  reward: {function: "my_reward:right", kind: reward}\n', "")],
        ("advantage", "task 'advantage' reads the column 'reward', which nobody writes"),
        ("stages", "task 'record' reads the column 'reward', which nobody writes"),
    ),
    case(
        "two writers",
        [("  advantage:", "  other: {plugin: again}\n  advantage:")],
        ("advantage", "column 'advantages' has 2 writers, one is allowed: 'other', 'advantage'"),
    ),
    case(
        "a cycle",
        [('{function: "my_reward:right", kind: reward}', "{plugin: circle}")],
        ("advantage", "tasks 'advantage', 'reward' wait for each other's columns"),
    ),
    case(
        "stage of two sources",
        [("{plugin: made_up}\nwork", '{plugin: made_up, function: "a:b"}\nwork')],
        ("advantage", "a stage has either `plugin` or `function`, exactly one of them"),
    ),
    case(
        "stage of no source",
        [("{plugin: made_up}\nwork", "{rows: 3}\nwork")],
        ("advantage", "a stage has either `plugin` or `function`"),
    ),
    case(
        "function without columns",
        [(", kind: reward", "")],
        ("reward", "a stage by `function` says what it `reads` and `writes`"),
    ),
    case(
        "settings of a stage that have no effect",
        [
            ("{plugin: made_up}\nwork", "{plugin: made_up, whole_groups: true, reads: [x]}\nwork"),
            ("kind: reward", "kind: reward, writes: [y]"),
        ],
        ("reward", "a stage of kind reward takes no writes: it would have no effect"),
        ("advantage", "a stage by `plugin` takes no reads, whole_groups: it would have no effect"),
    ),
    case(
        "stage named as the flow's own",
        [("  reward:", "  rollout:")],
        (None, "stage names ['rollout'] are taken by the flow's own tasks"),
    ),
    case(
        "stage named as one of the flow's own processes",
        [("  reward:", "  trainer:")],
        (None, "stage names ['trainer'] are taken by the flow's own tasks and processes"),
    ),
    case(
        "stage whose name is a path",
        [("  reward:", '  "../../reward":')],
        (None, "stages.../../reward", "pattern"),
    ),
    case(
        "stage whose name is too long for a socket",
        [("  reward:", f"  {'r' * 41}:")],
        (None, "at most 40 characters"),
    ),
    # Numbers out of range
    case(
        "deadlines shorter than the looks that would notice them",
        [("name: mine", "name: mine\nwatchdog: {stuck_s: 0.001, idle_s: 0.5}")],
        ("stuck_s", "watchdog.stuck_s: input should be greater than or equal to 1"),
        ("idle_s", "watchdog.idle_s: input should be greater than or equal to 1"),
    ),
    case(
        "temperature that is no number",
        [("max_new_tokens: 1", "max_new_tokens: 1, temperature: .nan")],
        ("temperature", "rollout.sampling.temperature: "),
    ),
    case(
        "temperature that is infinite",
        [("max_new_tokens: 1", "max_new_tokens: 1, temperature: .inf")],
        ("temperature", "rollout.sampling.temperature: input should be a finite number, got inf"),
    ),
    case(
        "stops that stop everything or nothing",
        [("max_new_tokens: 1", 'max_new_tokens: 1, stop: [""], stop_token_ids: [-1]')],
        ("stop", "rollout.sampling.stop.0: string should have at least 1 character"),
        ("stop", "rollout.sampling.stop_token_ids.0: input should be greater than or equal to 0"),
    ),
    case(
        "option that is infinite",
        [("lr: 1.0", "lr: .inf")],
        ("lr: .inf", "trainer.options.lr: input should be a finite number, got inf"),
    ),
    case(
        "score that is no number",
        [("evaluation: null", "evaluation: {success: .nan}")],
        ("success", "evaluation.success: input should be a finite number, got nan"),
    ),
    case(
        "more steps than versions can count",
        [("steps: 2", f"steps: {1 << 31}")],
        ("steps", f"workflow.steps: input should be less than {1 << 31}"),
    ),
    case(
        "device below 0",
        [("options: {slots: 4}", "options: {slots: 4}\n  devices: [0, -1]")],
        ("devices", "rollout.devices.1: input should be greater than or equal to 0"),
    ),
    case(
        "launcher without time or threads",
        [
            (
                "evaluation: null",
                "launcher: {options: {start_timeout_s: 0, stop_timeout_s: -1, threads: 0}}",
            )
        ],
        ("start_timeout_s", "launcher.options.start_timeout_s: input should be greater than 0"),
        ("start_timeout_s", "launcher.options.stop_timeout_s: input should be greater than or"),
        ("start_timeout_s", "launcher.options.threads: input should be greater than or equal to 1"),
    ),
    # All at once
    case(
        "everything at once",
        [
            ("preset: async", "presett: async"),
            ("{lr: 1.0}", "{lr: fast}"),
            ("plugin: tabular\n  options: {slots: 4}", "plugin: tabulr"),
            ("plugin: made_up}\nwork", "plugin: mdae_up}\nwork"),
        ],
        ("presett", "workflow.presett: unknown key; did you mean 'preset'?"),
        ("fast", "trainer.options.lr:"),
        ("tabulr", "no rollout plugin 'tabulr'"),
        ("mdae_up", "no stage plugin 'mdae_up'"),
    ),
    case(
        "plugins, capabilities and dataflow at once",
        [
            ("characters", "charcters"),
            ("max_new_tokens: 1", "max_new_tokens: 1, top_k: 3"),
            ("my_reward:right", "my_reward:typo"),
            ("{slots: 4}", "{slots: 4}\n  switch_mode: drain"),
        ],
        ("charcters", "no tokenizer plugin 'charcters'"),
        ("top_k", "cannot mask truncated sampling"),
        ("my_reward", "reads the column 'anwser'"),
    ),
]


@pytest.mark.parametrize(("edits", "expected", "faults"), CASES)
def test_doctor_mistake_is_named_with_its_place(
    edits, expected, faults, write, command, folder, no_start
):
    text = BASE
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    path = write(text)
    status, out, err = command("doctor", path)
    assert (status, err) == (2, "")
    count, *found = out.splitlines()
    for line, *fragments in expected:
        place = f"{path}:"
        if line is not None:
            place += f"{text[: text.index(line)].count(chr(10)) + 1}:"
        assert any(
            fault.startswith(f"  {place}") and all(part in fault for part in fragments)
            for fault in found
        ), f"{place} ... {fragments} is not in\n{out}"
    assert count == f"{len(found)} fault(s):"
    assert len(found) == faults, out

    status, out, err = command("run", path)
    assert (status, out) == (2, "")
    head, *again = err.splitlines()
    assert head == f"asyncflow: {len(found)} fault(s), nothing was started:"
    assert again == found
    assert not (folder / "runs").exists()

    status, out, err = command("doctor", path, "--json")
    assert status == 2
    assert json.loads(out) == {"ok": False, "faults": [fault[2:] for fault in found]}
