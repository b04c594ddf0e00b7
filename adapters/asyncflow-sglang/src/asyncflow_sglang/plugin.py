"""What this distribution offers; imports neither torch nor an HTTP library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import Registrar
from asyncflow_core.services.rollout import RolloutCapabilities, SwitchMode
from asyncflow_sglang.options import SGLangOptions, check, most_tokens

if TYPE_CHECKING:
    from asyncflow_sglang.service import SGLangRollout

__all__ = ["asyncflow_register", "capabilities"]


def capabilities(options: SGLangOptions) -> RolloutCapabilities:
    """What it can do with these options.

    Seeds repeat only on servers with deterministic inference, which SGLang has for some attention
    backends; stop strings need the server's tokenizer. Weights cannot be read back.
    """
    sampling = {"max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids"}
    if not options.engine_args.get("skip_tokenizer_init"):
        sampling.add("stop")
    return RolloutCapabilities(
        switch_modes=frozenset(SwitchMode),
        weight_sources=frozenset({"buckets", "path", "collective"}),
        sampling=frozenset(sampling),
        prefix=True,
        seeds=bool(options.engine_args.get("enable_deterministic_inference")),
        pause=True,
        readback=False,
        max_tokens=most_tokens(options),
    )


def _rollout(options: SGLangOptions, context: PartContext) -> SGLangRollout:
    from asyncflow_sglang.service import SGLangRollout

    return SGLangRollout(options, context)


@hookimpl
def asyncflow_register(registrar: Registrar) -> None:
    """Offer the rollout."""
    registrar.add(
        "rollout",
        "sglang",
        _rollout,
        api_version=1,
        options=SGLangOptions,
        capabilities=capabilities,
        check=check,
    )
