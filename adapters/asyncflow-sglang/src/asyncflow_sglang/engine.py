"""What is said to one server about itself: what it is, stand still, load, go on. Thin.

What is believed of the server, and what becomes of its requests, is `server.py`'s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncflow_core.errors import EngineError
from asyncflow_sglang import probe
from asyncflow_sglang._compat import check_version
from asyncflow_sglang.http import Http, RefusedError
from asyncflow_sglang.options import SGLangOptions
from asyncflow_sglang.proof import Proof
from asyncflow_sglang.push import Pusher
from asyncflow_sglang.replies import Labels

__all__ = ["Engine", "Facts"]

_CALL_S = 30.0
"""Deadline of calls that ask or name."""


@dataclass(slots=True)
class Facts:
    """What a server says of itself."""

    args: dict[str, Any] = field(default_factory=dict)
    input_tokens: int = 0
    ranks: int = 1


class Engine:
    """Control calls to one server.

    Every method raises `RefusedError` or `UnreachableError` if the server will not or does not
    answer.

    Attributes:
        facts: what it said of itself.
        defined: whether its log-probs were found to be those of the schema.
        stands: whether it is paused; None if that is not known.
    """

    def __init__(
        self, name: str, http: Http, *, options: SGLangOptions, labels: Labels, vocab: int
    ) -> None:
        """Keep the arguments; see `Server`."""
        self.facts = Facts()
        self.defined = False
        self.stands: bool | None = None
        self._name = name
        self._http = http
        self._options = options
        self._labels = labels
        self._vocab = vocab
        self._pusher = Pusher(http, options)

    async def aclose(self) -> None:
        """Leave its broadcast group."""
        await self._pusher.aclose()

    def forget(self) -> None:
        """The server is gone, or may be another when it comes back."""
        self.defined, self.stands = False, None
        self._pusher.forget()

    async def label(self, *, timeout_s: float = _CALL_S) -> str:
        """Name of the weights it serves; answered at once, in a pause too.

        Raises:
            EngineError: something else than SGLang answers there.
        """
        return str((await self._ask("/model_info", timeout_s, "weight_version"))["weight_version"])

    def hopeless(self, error: RefusedError | EngineError) -> EngineError | None:
        """What to say of an answer to `label` after which no other will come; None if one may."""
        if isinstance(error, EngineError):
            return error
        where = f"{self._name} ({self._http.url})"
        words = {
            401: f"wants another API key; api_key_env is {self._options.api_key_env!r}, it names "
            f"the environment variable that holds the key",
            404: "has no /model_info; give the address of an SGLang server, as http://HOST:PORT",
        }
        found = words.get({403: 401, 405: 404}.get(error.status, error.status))
        if found is None:
            return None
        return EngineError(f"{where} {found} ({error})", service=self._name)

    async def _ask(self, path: str, timeout_s: float, *needed: str) -> dict[str, Any]:
        found = await self._http.get(path, timeout_s=timeout_s)
        lacks = [n for n in needed if not isinstance(found, dict) or found.get(n) is None]
        if lacks:
            raise EngineError(
                f"{self._name}: {self._http.url}{path} gives no {lacks[0]}, but "
                f"{str(found)[:200]!r}; is this the address of an SGLang server?",
                service=self._name,
            )
        return dict(found)

    async def greet(self) -> None:
        """Learn what it is.

        Raises:
            EngineError: it cannot be used.
        """
        info = await self._ask("/server_info", _CALL_S, "version", "max_req_input_len")
        check_version(str(info["version"]), server=self._name)
        state = (info.get("internal_states") or [{}])[0]
        if int(info.get("tokenizer_worker_num") or 1) != 1:
            raise EngineError(
                f"{self._name} runs {info['tokenizer_worker_num']} tokenizer workers, allowed: 1; "
                f"with more, a pause and an update reach different ones and wait for each other",
                service=self._name,
            )
        ranks = int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1)
        self.facts = Facts({**info, **state}, int(info["max_req_input_len"]), ranks)
        if self.defined:
            return
        self._check_model(await self._ask("/model_info", _CALL_S, "weight_version"))
        await self.go_on()  # an earlier run may have left it paused
        prompt = probe.fixed_prompt(self._vocab, self.facts.input_tokens)
        limit = self._options.update_timeout_s
        await probe.check_definition(self._http, prompt, timeout_s=limit)
        self.defined = True

    def _check_model(self, info: dict[str, Any]) -> None:
        config = json.loads((Path(self._options.model) / "config.json").read_text("utf-8"))
        ours, theirs = config.get("architectures"), info.get("architectures")
        if ours and theirs and ours != theirs:
            raise EngineError(
                f"{self._name} serves {info.get('model_path')!r}, a {', '.join(theirs)}; model "
                f"{self._options.model!r} is a {', '.join(ours)}; give the model that it serves",
                service=self._name,
            )

    async def rename(self, label: str) -> None:
        """Give the weights it serves another name."""
        named = {"new_version": label, "abort_all_requests": False}
        await self._http.post("/update_weight_version", named, timeout_s=_CALL_S)

    async def load(self, proof: Proof, *, flush: bool) -> None:
        """Let it load a version while it stands.

        It names its weights unknown, before and after, until they are proven: who is killed here,
        or gives up, leaves nothing under a name that somebody trusts.

        Raises:
            EngineError: the broadcast failed.
        """
        label = self._labels.loading
        await self.rename(label)
        await self._pusher.push(proof.held, label, flush=flush, ranks=self.facts.ranks)

    async def prove(self, proof: Proof) -> str:
        """Hold the version against what it shows; returns by what. Log-probs make it go on.

        Raises:
            EngineError: it holds something else.
        """
        how, limit = proof.by(self.facts.args), self._options.update_timeout_s
        facts = (self.facts.args, self.facts.input_tokens)
        if how == "checksum":
            await proof.by_checksum(self._http, *facts, timeout_s=limit)
        elif how == "logprobs":
            await self.go_on()
            await proof.by_logprobs(self._http, *facts, timeout_s=limit)
        return how

    async def hold(self, mode: str) -> None:
        """Stand still: "in_place" or "retract"."""
        self.stands = None
        await self._post("/pause_generation", {"mode": mode})
        self.stands = True

    async def go_on(self) -> None:
        """Pause no longer."""
        self.stands = None
        await self._post("/continue_generation", {"torch_empty_cache": False})
        self.stands = False

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        await self._http.post(path, body, timeout_s=self._options.update_timeout_s)
