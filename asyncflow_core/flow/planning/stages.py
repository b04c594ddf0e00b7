"""From a stage's configuration to the function that runs and what it reads and writes."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from asyncflow_core.config import StageConfig
from asyncflow_core.errors import ConfigError
from asyncflow_core.flow.building import build
from asyncflow_core.parts import PartContext, Stage, StageContract, row_scorer
from asyncflow_core.registry import Plugin

__all__ = ["LOGPROB_READS", "function_contract", "load_function", "make_stage", "plugin_contract"]

LOGPROB_READS = ("prompt_ids", "response_ids", "sampling")
"""What a trainer reads to give log-probs of responses."""

_TEXTS = {"prompt": "prompt_ids", "response": "response_ids"}


def load_function(function: str | Callable[..., Any]) -> Callable[..., Any]:
    """A function by `module:name`, or itself.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.
    """
    if not isinstance(function, str):
        return function
    module_name, colon, name = function.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"function {function!r} is not of the form module:name")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a user's module may do anything
        raise ConfigError(
            f"function {function!r} cannot be loaded: {type(error).__name__}: {error}; "
            f"{_load_hint(module_name, name)}"
        ) from error
    if not callable(found):
        raise ConfigError(
            f"function {function!r} is of type {type(found).__name__}, it cannot be called"
        )
    made: Callable[..., Any] = found
    return made


def _load_hint(module_name: str, name: str) -> str:
    """What to write instead."""
    if module_name.endswith(".py"):
        plain = module_name.removesuffix(".py").replace("/", ".").lstrip(".")
        return f"a module is named without .py; did you mean '{plain}:{name}'?"
    there = getattr(sys.modules.get(module_name), "__dict__", {})
    names = [found for found in there if inspect.isfunction(there[found])]
    if near := difflib.get_close_matches(name, names, n=1):
        return f"did you mean '{module_name}:{near[0]}'?"
    if names:
        return f"the functions there are {', '.join(names)}"
    return "its module must be importable from the folder where the command is started"


def function_contract(stage: StageConfig) -> StageContract:
    """What a stage by function reads and writes; a reward's reads are its parameters.

    Raises:
        ConfigError: the function cannot be loaded or is async, or a reward takes no usable
            parameters.
    """
    if stage.model and not stage.function:
        writes = stage.writes or ("ref_logprobs",)
        return StageContract(LOGPROB_READS, writes, partitions=stage.partitions or ("train",))
    function = load_function(stage.function)
    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        raise ConfigError(
            f"function {getattr(function, '__qualname__', function)!r} is async, and a stage "
            f"awaits nothing; give a plain function, in which asyncio.run may wait for many calls"
        )
    if stage.kind == "columns":
        partitions = stage.partitions or ("train",)
        return StageContract(stage.reads, stage.writes, stage.whole_groups, partitions)
    names = _parameters(function)
    reads = tuple(dict.fromkeys([*(_TEXTS.get(n, n) for n in names), *stage.reads]))
    return StageContract(
        reads, ("reward", "reward_error"), partitions=stage.partitions or ("train", "eval")
    )


def plugin_contract(plugin: Plugin, options: Any) -> StageContract:
    """What a plugin declares; `ConfigError` if it declares nothing, or fails when asked."""
    try:
        contract = plugin.contract(options) if callable(plugin.contract) else plugin.contract
    except Exception as error:
        raise ConfigError(
            f"{plugin.label} of {plugin.distribution} failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(contract, StageContract):
        raise ConfigError(f"{plugin.label} of {plugin.distribution} declares no contract")
    return contract


def make_stage(stage: StageConfig, plugin: Plugin | None, options: Any, ctx: PartContext) -> Stage:
    """Build what runs."""
    if plugin is not None:
        made: Stage = build(plugin, options, ctx)
        if not callable(made):
            raise ConfigError(
                f"{plugin.label} of {plugin.distribution} makes a {type(made).__name__}; a stage "
                f"is called with a batch"
            )
        return made
    function = load_function(stage.function)
    if stage.kind == "reward":
        return row_scorer(function, _parameters(function), ctx.tokenizer)
    return function


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a reward's parameters must be known: {error}") from error
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    wrong = [p.name for p in parameters if p.kind not in named]
    if wrong or not parameters:
        raise ConfigError(
            f"a reward's parameters are named after `prompt`, `response` or columns; "
            f"{getattr(function, '__qualname__', function)!r} takes {wrong or 'none'}"
        )
    return tuple(p.name for p in parameters if p.default is inspect.Parameter.empty)
