import subprocess
import sys

import pytest
from pydantic import ValidationError

from asyncflow_algorithms import plugin
from asyncflow_algorithms.options import GrpoOptions, PpoClipOptions, TisOptions
from asyncflow_core.errors import ConfigError
from asyncflow_core.losses import resolve_loss
from asyncflow_core.registry import Registry
from asyncflow_core.services.trainer import LossSpec


@pytest.fixture
def registry():
    made = Registry([])
    made.add(plugin)
    return made


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({}, {"behaviour_logprobs", "advantages"}),
        ({"kl_coef": 0.1}, {"behaviour_logprobs", "advantages", "ref_logprobs"}),
        (
            {"ratio_to": "proximal"},
            {"behaviour_logprobs", "advantages", "proximal_logprobs"},
        ),
    ],
)
def test_ppo_clip_reads_follow_the_options(registry, options, reads):
    loss = resolve_loss(registry, LossSpec("ppo_clip", options), arrays="torch")
    assert set(loss.capabilities.reads) == reads
    assert not loss.capabilities.needs_entropy


def test_entropy_bonus_trainer_without_entropy_refused(registry):
    spec = LossSpec("tis", {"entropy_coef": 0.01})
    assert resolve_loss(registry, spec, arrays="torch", entropy=True).capabilities.needs_entropy
    with pytest.raises(ConfigError, match="entropy"):
        resolve_loss(registry, spec, arrays="torch")


def test_grpo_contract_whole_groups(registry):
    contract = registry.get("stage", "grpo").contract
    assert contract.whole_groups
    assert contract.writes == ("advantages",)
    assert contract.partitions == ("train",)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (GrpoOptions, {"normalise_std": False, "eps": 0.1}),
        (PpoClipOptions, {"aggregate": "dr_grpo"}),
        (PpoClipOptions, {"max_tokens": 10}),
        (PpoClipOptions, {"behaviour_cap": 2.0}),
        (PpoClipOptions, {"dual_clip": 1.0}),
        (TisOptions, {"cap": 0}),
        (TisOptions, {"clip_low": 0.2}),
    ],
)
def test_options_without_effect_or_range_refused(model, options):
    with pytest.raises(ValidationError):
        model(**options)


def test_plugin_module_import_leaves_torch_out():
    code = "import asyncflow_algorithms.plugin, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
