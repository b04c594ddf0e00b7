"""Reward stages: a score a row from its response."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from asyncflow_core.errors import ConfigError
from asyncflow_core.parts import PartContext, Stage, StageContract, row_scorer
from asyncflow_rewards import gym
from asyncflow_rewards.options import ExactMatchOptions, ReasoningGymRewardOptions

__all__ = [
    "exact_match_contract",
    "exact_match_stage",
    "reasoning_gym_contract",
    "reasoning_gym_faults",
    "reasoning_gym_stage",
]


def _contract(column: str, require_stop: bool) -> StageContract:
    reads = ("response_ids", column, *(["finish_reason"] if require_stop else []))
    return StageContract(reads, ("reward", "reward_error"), partitions=("train", "eval"))


def exact_match_contract(options: ExactMatchOptions) -> StageContract:
    """What `exact_match` reads and writes."""
    return _contract(options.answer, options.require_stop)


def reasoning_gym_contract(options: ReasoningGymRewardOptions) -> StageContract:
    """What `reasoning_gym` reads and writes."""
    return _contract("entry", options.require_stop)


def _scorer(
    name: str,
    ctx: PartContext,
    column: str,
    require_stop: bool,
    score: Callable[[str, Any], float],
) -> Stage:
    if ctx.tokenizer is None:
        raise ConfigError(f"the stage {name!r} needs a tokenizer; name one in the config")

    def score_row(**row: Any) -> float:
        if require_stop and row["finish_reason"] != "stop":
            return 0.0
        return score(row["response"], row[column])

    parameters = ["response", column, *(["finish_reason"] if require_stop else [])]
    return row_scorer(score_row, parameters, ctx.tokenizer)


def _last_tagged(text: str, tag: str) -> str | None:
    """What stands between the last closing tag and the opening one nearest before it."""
    stop = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(stop, 0))
    return None if start < 0 else text[start + len(tag) + 2 : stop]


def exact_match_stage(options: ExactMatchOptions, ctx: PartContext) -> Stage:
    """1 for a response that is the answer, else 0."""

    def normal(text: str) -> str:
        text = text.strip() if options.strip else text
        return text if options.case else text.casefold()

    def score(response: str, answer: Any) -> float:
        if not isinstance(answer, str):
            raise TypeError(f"column {options.answer!r} holds {type(answer).__name__}, not text")
        return float(normal(response) == normal(answer))

    return _scorer("exact_match", ctx, options.answer, options.require_stop, score)


def reasoning_gym_faults(options: ReasoningGymRewardOptions) -> list[str]:
    """Every fault of the options that can be seen without a row."""
    if options.dataset:
        return gym.draw_faults(options.dataset, options.dataset_options)[0]
    faults = gym.dataset_faults("spell_backward")  # any name: is reasoning-gym there at all
    if options.dataset_options:
        faults.append("dataset_options need a dataset; name it beside them")
    return faults


def reasoning_gym_stage(options: ReasoningGymRewardOptions, ctx: PartContext) -> Stage:
    """The score of the dataset's own verifier."""
    faults = reasoning_gym_faults(options)
    if faults:
        raise ConfigError(faults)

    @cache
    def verifier(dataset: str) -> Callable[[str, Any], Any]:
        score_answer: Callable[[str, Any], Any] = gym.create(
            dataset, options.dataset_options
        ).score_answer
        return score_answer

    def score(response: str, entry: Any) -> float:
        if options.answer_tag:
            answer = _last_tagged(response, options.answer_tag)
            if answer is None:
                return 0.0
            response = answer
        dataset = options.dataset or entry["metadata"]["source_dataset"]
        text = response.strip() if options.strip else response
        value = float(verifier(dataset)(text, gym.restore(entry, dataset)))
        # Compared exactly: the parts of a wrong answer's score can add up to 0.9999999999999999.
        return float(value == 1.0) if options.exact else value

    return _scorer("reasoning_gym", ctx, "entry", options.require_stop, score)
