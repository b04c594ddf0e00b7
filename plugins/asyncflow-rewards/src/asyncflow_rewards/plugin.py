"""Registration; reasoning-gym is imported only when something is checked or built."""

from __future__ import annotations

from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import PartContext, Prompts, StageContract
from asyncflow_core.registry import Registrar
from asyncflow_rewards import stages
from asyncflow_rewards.options import (
    ExactMatchOptions,
    ReasoningGymPromptsOptions,
    ReasoningGymRewardOptions,
)

__all__ = ["asyncflow_register"]


def _prompts(options: ReasoningGymPromptsOptions, ctx: PartContext) -> Prompts:
    from asyncflow_rewards.prompts import ReasoningGymPrompts

    return ReasoningGymPrompts(options, ctx)


def _prompts_check(options: ReasoningGymPromptsOptions) -> list[str]:
    from asyncflow_rewards.prompts import prompts_faults

    return prompts_faults(options)


@hookimpl
def asyncflow_register(registrar: Registrar) -> None:
    """Offer the stages `exact_match` and `reasoning_gym`, and the prompts `reasoning_gym`."""
    registrar.add(
        "stage",
        "exact_match",
        stages.exact_match_stage,
        api_version=1,
        options=ExactMatchOptions,
        contract=stages.exact_match_contract,
    )
    registrar.add(
        "stage",
        "reasoning_gym",
        stages.reasoning_gym_stage,
        api_version=1,
        options=ReasoningGymRewardOptions,
        contract=stages.reasoning_gym_contract,
        check=stages.reasoning_gym_faults,
    )
    registrar.add(
        "prompts",
        "reasoning_gym",
        _prompts,
        api_version=1,
        options=ReasoningGymPromptsOptions,
        contract=StageContract((), ("answer", "entry")),
        check=_prompts_check,
    )
