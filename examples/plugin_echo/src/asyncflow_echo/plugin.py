"""What the package offers. It is imported to read that, so it imports no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from asyncflow_core.batch import Batch
from asyncflow_core.config import Section
from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import PartContext, Stage, StageContract
from asyncflow_core.registry import Registrar
from asyncflow_core.services.rollout import Rollout, RolloutCapabilities

__all__ = ["CAPABILITIES", "EchoOptions", "asyncflow_register"]

CAPABILITIES = RolloutCapabilities()  # the minimum: see the class for what that is


class EchoOptions(Section):
    """Options of the rollout `echo`."""

    vocab_size: int = Field(ge=2)
    """Token ids are below this."""


class BrevityOptions(Section):
    """Options of the stage `brevity`."""

    token_cost: float = Field(default=0.01, ge=0.0)
    """Taken from the score for each response token."""


def _echo(options: EchoOptions, ctx: PartContext) -> Rollout:
    from asyncflow_echo.rollout import EchoRollout

    return EchoRollout(options, ctx)


def _brevity(options: BrevityOptions, ctx: PartContext) -> Stage:
    def stage(batch: Batch) -> Mapping[str, Any]:
        lengths = batch["response_ids"].lengths
        score = np.asarray(batch["score"].values, np.float32)
        return {"reward": score - np.float32(options.token_cost) * lengths}

    return stage


@hookimpl
def asyncflow_register(registrar: Registrar) -> None:
    """Offer the rollout `echo` and the stage `brevity`."""
    registrar.add(
        "rollout", "echo", _echo, api_version=1, options=EchoOptions, capabilities=CAPABILITIES
    )
    registrar.add(
        "stage",
        "brevity",
        _brevity,
        api_version=1,
        options=BrevityOptions,
        contract=StageContract(
            ("response_ids", "score"), ("reward",), partitions=("train", "eval")
        ),
    )
