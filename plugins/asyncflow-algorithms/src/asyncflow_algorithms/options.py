"""What a user may set for each algorithm."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["GrpoOptions", "LossOptions", "PpoClipOptions", "TisOptions"]


class GrpoOptions(BaseModel):
    """Options of the stage `grpo`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    normalise_std: bool = True
    """Divide by the group's standard deviation (GRPO, arXiv:2402.03300); off is Dr. GRPO's
    (arXiv:2503.20783), which does not favour prompts that are nearly always right or wrong."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation; the value of verl's GRPO."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if not self.normalise_std and "eps" in self.model_fields_set:
            raise ValueError("eps has no effect with normalise_std: false; leave it out")
        return self


class LossOptions(BaseModel):
    """What every policy loss here takes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    aggregate: Literal["token", "sequence", "dr_grpo"] = "token"
    """Which mean is trained. token: over all trained tokens of the update (DAPO,
    arXiv:2503.14476). sequence: over sequences, of each one's mean over its trained tokens (GRPO,
    arXiv:2402.03300). dr_grpo: over sequences, of each one's sum divided by `max_tokens`
    (arXiv:2503.20783). A sequence counts when at least one of its tokens is trained."""
    max_tokens: int | None = Field(default=None, gt=0)
    """With aggregate: dr_grpo, and needed there: the constant a sequence's sum is divided by,
    usually the generation limit."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference, estimated by k3; above 0 the loss reads
    `ref_logprobs`. Off by default, as in DAPO."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus; above 0 the trainer must give the entropy. Off by default, as
    in GRPO."""

    @model_validator(mode="after")
    def _constant(self) -> Self:
        if (self.aggregate == "dr_grpo") != (self.max_tokens is not None):
            raise ValueError(
                f"max_tokens belongs to aggregate: dr_grpo, which needs it; got aggregate "
                f"{self.aggregate!r} with max_tokens {self.max_tokens}"
            )
        return self


class PpoClipOptions(LossOptions):
    """Options of the loss `ppo_clip`."""

    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is held above 1 - clip_low; PPO's value (arXiv:1707.06347)."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is held below 1 + clip_high; PPO's value. DAPO's "clip higher" is 0.28."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds a token's loss at this many times its negative advantage (arXiv:1912.09729, which
    takes 3). Not set: unbounded, as in PPO."""
    ratio_to: Literal["behaviour", "proximal"] = "behaviour"
    """Whose log-probs the ratio is taken to. behaviour: of the policy that sampled. proximal: of
    the step's first weights, each token weighted by the capped ratio of those to the sampling
    policy: decoupled PPO (arXiv:2110.00641, arXiv:2505.24298)."""
    behaviour_cap: float = Field(default=2.0, gt=0)
    """With ratio_to: proximal, the cap of that weight; as for `tis`."""

    @model_validator(mode="after")
    def _effective(self) -> Self:
        if self.ratio_to == "behaviour" and "behaviour_cap" in self.model_fields_set:
            raise ValueError("behaviour_cap has no effect with ratio_to: behaviour; leave it out")
        return self


class TisOptions(LossOptions):
    """Options of the loss `tis`."""

    cap: float = Field(default=2.0, gt=0)
    """Importance weights are cut here; verl's default (rollout_is_threshold). The truncation
    is IMPALA's (arXiv:1802.01561)."""
    level: Literal["token", "sequence"] = "token"
    """One weight for each token, or for each sequence (the product over its trained tokens, cut
    after the product)."""
