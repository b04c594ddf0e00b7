"""Log-probs of a fixed prompt: the weaker proof of weights, and the check of their definition.

The reference is a float32 forward of transformers over the held files, in this process.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncflow_core.errors import EngineError, UnsupportedCapabilityError
from asyncflow_sglang.files import Held
from asyncflow_sglang.http import Http

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["check_definition", "difference", "fixed_prompt", "reference"]

_TOLERANCE = {"float32": 1e-3}
_HALF_TOLERANCE = 0.1
"""Largest mean difference of a log-prob; half precision rounds each layer."""


def fixed_prompt(vocab: int, tokens: int) -> list[int]:
    """Up to 24 ids, spread over the vocabulary; the same every time."""
    rng = np.random.default_rng(0)
    return [int(i) for i in rng.integers(0, vocab, min(24, tokens - 2))]


async def check_definition(http: Http, prompt: list[int], *, timeout_s: float) -> None:
    """`EngineError` if the server's log-probs are not those of logits / temperature.

    A server with SGLANG_RETURN_ORIGINAL_LOGPROB=1 leaves the temperature out.
    """
    plain, hot = [await _likeliest(http, prompt, t, timeout_s) for t in (1.0, 4.0)]
    # The likeliest token's log-prob falls as the temperature rises, unless it is certain anyway.
    if plain == hot and plain < -1e-6:
        raise EngineError(
            f"{http.url} gives the same log-prob {plain:g} at temperature 1 and 4: it reports "
            f"those of the plain logits; start it without SGLANG_RETURN_ORIGINAL_LOGPROB",
            service=http.url,
        )


async def _likeliest(http: Http, prompt: list[int], temperature: float, timeout_s: float) -> float:
    sampling = {"temperature": temperature}
    reply = await _ask(http, prompt, sampling, timeout_s, top_logprobs_num=1)
    return float(_logprobs(http, reply, "output_top_logprobs")[0][0][0])


async def difference(
    http: Http, prompt: list[int], ours: NDArray[np.float64], *, dtype: str, timeout_s: float
) -> str:
    """How the server's log-probs of the prompt differ from `ours`; empty if they agree.

    Args:
        http: the server.
        prompt: from `fixed_prompt`, P ids.
        ours: from `reference`; [P - 1].
        dtype: of the server's weights.
        timeout_s: of the server's answer.
    """
    reply = await _ask(http, prompt, {"temperature": 1.0}, timeout_s, logprob_start_len=0)
    entries = _logprobs(http, reply, "input_token_logprobs")[1:]
    theirs = np.array([entry[0] for entry in entries], np.float64)
    if theirs.shape != ours.shape:
        return f"log-probs of {len(theirs)} tokens came for {len(ours)}"
    gap = float(np.abs(theirs - ours).mean())
    limit = _TOLERANCE.get(dtype, _HALF_TOLERANCE)
    if gap <= limit:
        return ""
    return f"log-probs of the fixed prompt are {gap:.3g} off on average, allowed: {limit}"


def _logprobs(http: Http, reply: Any, name: str) -> Any:
    try:
        found = reply["meta_info"][name]
        float((found[1] if name.startswith("input") else found[0][0])[0])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(
            f"{http.url}/generate gives no {name} ({error!r}): {str(reply)[:300]}; is it SGLang?",
            service=http.url,
        ) from error
    return found


async def _ask(
    http: Http, prompt: list[int], sampling: Mapping[str, Any], timeout_s: float, **more: Any
) -> Any:
    body = {
        "rid": uuid.uuid4().hex,
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 1, "ignore_eos": True, **sampling},
        "return_logprob": True,
        "extra_key": uuid.uuid4().hex,  # never from a cache
        **more,
    }
    return await http.post("/generate", body, timeout_s=timeout_s)


def reference(held: Held, model: str, prompt: list[int]) -> NDArray[np.float64]:
    """Log-probs of the prompt's tokens after the first, under held weights; [P - 1]. Blocking.

    Raises:
        EngineError: transformers' model is not that of the weights.
        UnsupportedCapabilityError: torch or transformers is not installed.
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from asyncflow_sglang.tensors import tensor
    except ImportError as error:
        raise UnsupportedCapabilityError(
            f"weights can be proven on this server by log-probs only, which need torch here "
            f"({error}); try: pip install 'asyncflow-sglang[torch]', or set verify: off"
        ) from error

    config = AutoConfig.from_pretrained(model)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    state = {name: tensor(held, spec) for name, spec in held.tensors.items()}
    missing, unexpected = network.load_state_dict(state, strict=False)
    network.eval().tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise EngineError(
            f"transformers' model of {model} differs from the weights: missing {missing}, "
            f"unexpected {unexpected}"
        )
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        every = network(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
    found: NDArray[np.float64] = every.gather(1, ids[0, 1:, None])[:, 0].numpy()
    return found
