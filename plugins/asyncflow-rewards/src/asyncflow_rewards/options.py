"""What a user may set for rewards and prompts."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = ["ExactMatchOptions", "ReasoningGymPromptsOptions", "ReasoningGymRewardOptions"]


def _drawn(options: dict[str, Any]) -> dict[str, Any]:
    taken = sorted({"seed", "size"} & options.keys())
    if taken:
        raise ValueError(f"{taken} of a dataset are set by this plugin; leave them out")
    return options


class ExactMatchOptions(BaseModel):
    """Options of the stage `exact_match`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    answer: str = Field(default="answer", min_length=1)
    """Column that holds the right answer, a string."""
    strip: bool = True
    """Ignore white space around the response and the answer."""
    case: bool = True
    """Whether upper and lower case differ."""
    require_stop: bool = False
    """Score 0 unless the response ended by itself (`finish_reason` is "stop")."""


class ReasoningGymRewardOptions(BaseModel):
    """Options of the stage `reasoning_gym`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    dataset: str = ""
    """Whose verifier scores; empty: the dataset each entry names as its source."""
    dataset_options: dict[str, Any] = Field(default_factory=dict)
    """Handed to `reasoning_gym.create_dataset`; needed where a verifier depends on them."""
    exact: bool = False
    """Reward 1 only for a full score, else 0. Some verifiers give much credit for nearly nothing
    (spell_backward: 0.8 for one letter too many), which can teach the wrong thing."""
    strip: bool = True
    """Ignore white space around the response."""
    answer_tag: str = Field(default="", pattern=r"^\w*$")
    """Score only what stands in the last <tag>...</tag> of the response, and 0 without one; empty:
    the whole response."""
    require_stop: bool = False
    """Score 0 unless the response ended by itself (`finish_reason` is "stop")."""

    _no_seed = field_validator("dataset_options")(_drawn)


class ReasoningGymPromptsOptions(BaseModel):
    """Options of the prompts `reasoning_gym`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    dataset: str = Field(min_length=1)
    """Any dataset name of reasoning-gym."""
    dataset_options: dict[str, Any] = Field(default_factory=dict)
    """Handed to `reasoning_gym.create_dataset` untouched (`seed` and `size` are ours)."""
    template: str = "{question}"
    """The prompt: a `str.format` template over the entry, such as "{metadata[word]}>"."""
    chat: bool | None = None
    """Wrap the prompt as a user message; not set: when the tokenizer has a chat template."""
    pool_size: int | None = Field(default=None, gt=0)
    """Draw this many items once, drop repeats, and shuffle what is left anew each epoch: for
    datasets with few different prompts, and to train several epochs on the same ones. The pool
    does not depend on the run's seed. Not set: fresh draws each epoch."""
    size: int | None = Field(default=None, gt=0)
    """Prompts an epoch, at most, all different. Not set: all of the pool, or 500 fresh draws
    (reasoning-gym's own default)."""
    holdout: float = Field(default=0.125, ge=0, lt=1)
    """Share of all prompts, chosen by a hash of their text, kept for evaluation and never trained
    on. The default is that of the experiment in the README."""
    evaluation_size: int = Field(default=256, gt=0)
    """Held-out prompts used, at most; with 256 a measured share has a standard error up to .03."""
    max_prompt_chars: int | None = Field(default=None, gt=0)
    """Leave out longer prompts."""
    answer_pattern: str | None = None
    """Leave out entries whose answer does not match this regular expression from end to end, such
    as "[a-z]{3,6}"."""

    _no_seed = field_validator("dataset_options")(_drawn)

    @field_validator("answer_pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern
