"""What this distribution offers; imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registrar
from asyncflow_core.services.trainer import TrainerCapabilities
from asyncflow_hzp.options import HzpOptions, check_options

if TYPE_CHECKING:
    from asyncflow_hzp.service import HzpTrainer

__all__ = ["CAPABILITIES", "asyncflow_register"]

CAPABILITIES = TrainerCapabilities(
    loss_arrays="torch", max_world_size=None, entropy=True, model_export=True
)


def _trainer(options: HzpOptions, context: PartContext) -> HzpTrainer:
    from asyncflow_hzp.service import HzpTrainer

    return HzpTrainer(options, context)


@hookimpl
def asyncflow_register(registrar: Registrar) -> None:
    """Offer the trainer."""
    registrar.add(
        "trainer",
        "hzp",
        _trainer,
        api_version=1,
        options=HzpOptions,
        capabilities=lambda options: replace(CAPABILITIES, sharded_export=options.sharded_export),
        check=check_options,
    )
