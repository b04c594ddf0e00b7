"""Registration; torch is imported only when a loss is built."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from asyncflow_algorithms.options import GrpoOptions, LossOptions, PpoClipOptions, TisOptions
from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import PartContext, Stage, StageContract
from asyncflow_core.registry import Registrar
from asyncflow_core.services.trainer import Loss, LossCapabilities

__all__ = ["asyncflow_register"]


def _grpo(options: GrpoOptions, ctx: PartContext) -> Stage:
    del ctx
    from asyncflow_algorithms.advantages import grpo_stage

    return grpo_stage(options)


# The losses get their options with every call, as `config`; the factories only import torch.
def _ppo_clip(options: PpoClipOptions, ctx: PartContext) -> Loss:
    del options, ctx
    from asyncflow_algorithms.losses import ppo_clip

    return ppo_clip


def _tis(options: TisOptions, ctx: PartContext) -> Loss:
    del options, ctx
    from asyncflow_algorithms.losses import tis

    return tis


def _loss_capabilities(options: LossOptions) -> LossCapabilities:
    reads = ["behaviour_logprobs", "advantages"]
    if isinstance(options, PpoClipOptions) and options.ratio_to == "proximal":
        reads.append("proximal_logprobs")
    if options.kl_coef:
        reads.append("ref_logprobs")
    return LossCapabilities("torch", tuple(reads), needs_entropy=options.entropy_coef > 0)


def _check_torch(options: Any) -> list[str]:
    del options
    if find_spec("torch") is None:
        return ["the losses of asyncflow-algorithms need torch; try: pip install torch"]
    return []


@hookimpl
def asyncflow_register(registrar: Registrar) -> None:
    """Offer the stage `grpo` and the losses `ppo_clip` and `tis`."""
    registrar.add(
        "stage",
        "grpo",
        _grpo,
        api_version=1,
        options=GrpoOptions,
        contract=StageContract(("reward", "response_ids"), ("advantages",), whole_groups=True),
    )
    registrar.add(
        "loss",
        "ppo_clip",
        _ppo_clip,
        api_version=1,
        options=PpoClipOptions,
        capabilities=_loss_capabilities,
        check=_check_torch,
    )
    registrar.add(
        "loss",
        "tis",
        _tis,
        api_version=1,
        options=TisOptions,
        capabilities=_loss_capabilities,
        check=_check_torch,
    )
