"""A sound configuration of core's own plugins and a few made up ones, to be broken on purpose."""

import signal
import sys

import pytest

from asyncflow_core.cli.main import main

BASE = """\
name: mine
out: OUT
tokenizer: {plugin: characters, options: {alphabet: abc}}
prompts: {plugin: jsonl, options: {path: prompts.jsonl}}
rollout:
  plugin: tabular
  options: {slots: 4}
  sampling: {max_new_tokens: 1}
trainer:
  plugin: tabular
  options: {lr: 1.0}
loss: {plugin: tabular_ppo_clip}
stages:
  reward: {function: "my_reward:right", kind: reward}
  advantage: {plugin: made_up}
workflow: {preset: async, steps: 2, groups_per_step: 4, group_size: 2}
weight_sync: {plugin: made_up}
evaluation: null
"""

PROMPTS = '{"prompt": "a", "answer": "b"}\n{"prompt": "b", "answer": "c"}\n'

REWARDS = """\
def right(response, answer):
    return float(response == answer)

def typo(response, anwser):
    return 0.0

def stars(*args):
    return 0.0

def nothing():
    return 0.0

async def later(response):
    return 0.0

def columns(batch):
    return {"extra": [0] * batch.rows}

def plain(batch):
    return {"advantages": [[1.0] * n for n in batch["response_ids"].lengths]}

NUMBER = 3
"""

BROKEN = "import this_module_is_not_there\n"

FAKES = """\
from asyncflow_core import hookimpl
from asyncflow_core.parts import StageContract
from asyncflow_core.services.rollout import RolloutCapabilities
from asyncflow_core.services.trainer import LossCapabilities, TrainerCapabilities
from asyncflow_core.services.weight_sync import WeightSyncCapabilities

def check_that_fails(options):
    raise RuntimeError("the check fell over")

@hookimpl
def asyncflow_register(registrar):
    def add(kind, name, able=None, **more):
        registrar.add(kind, name, dict, api_version=1, capabilities=able, **more)

    add("rollout", "plain", RolloutCapabilities())
    add("rollout", "asks", lambda options: RolloutCapabilities(max_tokens=options.not_there))
    add("rollout", "short", RolloutCapabilities(max_tokens=64))
    add("rollout", "by_path", RolloutCapabilities(weight_sources=frozenset({"path"})))
    add("trainer", "torchish", TrainerCapabilities(max_world_size=2))
    add("loss", "entropy", LossCapabilities(arrays="numpy", needs_entropy=True))
    add("loss", "torchish", LossCapabilities(arrays="torch"))
    add("loss", "reference", LossCapabilities(arrays="numpy", reads=("ref_logprobs",)))
    add("weight_sync", "made_up", WeightSyncCapabilities(localities=frozenset({"host", "process"})))
    add("stage", "made_up", contract=StageContract(("reward",), ("advantages",), True))
    add("stage", "again", contract=StageContract(("reward",), ("advantages",), True))
    add("stage", "circle", contract=StageContract(("advantages",), ("reward", "reward_error")))
    add("stage", "no_contract")
    add("stage", "bad_contract", contract=lambda options: 1 / 0)
    add("rollout", "no_record")
    add("rollout", "bad_check", RolloutCapabilities(), check=check_that_fails)
"""

NAMES = (
    *(
        "rollout.plain",
        "rollout.short",
        "rollout.by_path",
        "rollout.no_record",
        *("rollout.bad_check", "rollout.asks"),
    ),
    *("trainer.torchish", "loss.torchish", "loss.entropy", "loss.reference"),
    *("weight_sync.made_up", "stage.made_up", "stage.again", "stage.circle"),
    *("stage.no_contract", "stage.bad_contract", "stage.forgotten"),
)


def distribution(site, name, points, modules):
    """A distribution as pip leaves it behind, without pip."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{point} = {module}\n" for point, module in points.items())
    (info / "entry_points.txt").write_text(f"[asyncflow]\n{lines}")
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder: prompts, rewards, plugins nearby; the command is started in it."""
    monkeypatch.setenv("ASYNCFLOW_PLUGINS", "af-config,af-broken")
    site = tmp_path / "site"
    distribution(
        site, "af-config", dict.fromkeys(NAMES, "af_config_fakes"), {"af_config_fakes": FAKES}
    )
    distribution(
        site, "af-broken", {"rollout.broken": "af_config_broken"}, {"af_config_broken": BROKEN}
    )
    made = tmp_path / "user"
    made.mkdir()
    (made / "prompts.jsonl").write_text(PROMPTS)
    (made / "my_reward.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(made)
    modules = set(sys.modules)
    yield made
    for name in {"my_reward", "af_config_fakes", "af_config_broken"} - modules:
        sys.modules.pop(name, None)


@pytest.fixture
def write(folder):
    """Write a configuration; returns its path."""

    def call(text=BASE):
        path = folder / "config.yaml"
        path.write_text(text.replace("OUT", str(folder / "runs")), encoding="utf-8")
        return path

    return call


@pytest.fixture
def command(capsys):
    """Run `asyncflow ARGUMENTS` in this process: status, standard output, standard error."""

    def call(*arguments):
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return call


@pytest.fixture(autouse=True)
def _signals():
    """`asyncflow run` and `serve` take them; the tests' own process gets them back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def no_start(monkeypatch):
    """Nothing may be started: neither a process nor a run."""

    def refuse(*_, **__):
        pytest.fail("something was started")

    monkeypatch.setattr("subprocess.Popen.__init__", refuse)
    monkeypatch.setattr("asyncio.create_subprocess_exec", refuse)
    monkeypatch.setattr("asyncflow_core.flow.running.folder.RunFolder.__init__", refuse)
