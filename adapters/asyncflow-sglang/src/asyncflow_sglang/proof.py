"""What a server must show to hold a version; worked out while it still generates.

A server stands still while its weights are proven, so the expected side of the proof is computed
when the version is staged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from asyncflow_core.errors import EngineError
from asyncflow_sglang import layout, probe
from asyncflow_sglang.files import Held
from asyncflow_sglang.http import Http

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Proof"]


class Proof:
    """A held version and what it looks like on a server.

    Attributes:
        held: the version.
        model: directory with config.json.
        how: "auto", "checksum", "logprobs" or "off".
        vocab: size of the vocabulary.
    """

    def __init__(self, held: Held, *, model: str, how: str, vocab: int) -> None:
        """Keep the arguments; `prepare` computes."""
        self.held = held
        self._model = model
        self._how = how
        self._vocab = vocab
        self._sums: dict[str, str] | None = None
        self._logprobs: dict[int, NDArray[Any]] = {}
        self._computing = asyncio.Lock()

    def unknown(self, server: Mapping[str, Any]) -> str:
        """Why no checksum can prove it on a server, so that log-probs must; empty if one can.

        Args:
            server: its own arguments.
        """
        if self._how in ("checksum", "off"):
            return ""
        if self._how == "logprobs":
            return "option verify"
        return self._unknown_layout(server)

    def by(self, server: Mapping[str, Any]) -> str:
        """What proves it there: "checksum", "logprobs" or "off"."""
        if self._how != "auto":
            return self._how
        return "logprobs" if self.unknown(server) else "checksum"

    async def prepare(self, server: Mapping[str, Any], input_tokens: int) -> None:
        """Compute what a server will be held against; once for all servers alike.

        Raises:
            EngineError: `verify: checksum`, and the server's layout is not known; or transformers'
                model is not that of the weights.
            UnsupportedCapabilityError: log-probs must prove it, and torch is not installed.
        """
        how = self.by(server)
        if how == "checksum" and (reason := self._unknown_layout(server)):
            raise EngineError(
                f"verify: checksum cannot prove weights on this server: {reason}; use verify: auto"
            )
        prompt = probe.fixed_prompt(self._vocab, input_tokens)
        async with self._computing:
            if how == "checksum" and self._sums is None:
                self._sums = await asyncio.to_thread(layout.expected, self.held)
            if how == "logprobs" and len(prompt) not in self._logprobs:
                self._logprobs[len(prompt)] = await asyncio.to_thread(
                    probe.reference, self.held, self._model, prompt
                )

    def _unknown_layout(self, server: Mapping[str, Any]) -> str:
        return layout.known_reason(self._model, server, self.held)

    async def by_checksum(
        self, http: Http, server: Mapping[str, Any], input_tokens: int, *, timeout_s: float
    ) -> None:
        """`EngineError` if the server's own checksums are others. It may be paused."""
        await self.prepare(server, input_tokens)
        asked = {"action": "checksum"}
        answer = await http.post("/weights_checker", asked, timeout_s=timeout_s)
        assert self._sums is not None
        self._hold(http, layout.difference(self._sums, answer))

    async def by_logprobs(
        self, http: Http, server: Mapping[str, Any], input_tokens: int, *, timeout_s: float
    ) -> None:
        """`EngineError` if the server's log-probs of a fixed prompt are others."""
        await self.prepare(server, input_tokens)
        prompt = probe.fixed_prompt(self._vocab, input_tokens)
        found = await probe.difference(
            http,
            prompt,
            self._logprobs[len(prompt)],
            dtype=str(server.get("dtype")),
            timeout_s=timeout_s,
        )
        self._hold(http, found)

    def _hold(self, http: Http, difference: str) -> None:
        if difference:
            raise EngineError(
                f"{http.url} does not hold version {self.held.version}: {difference}",
                service=http.url,
            )
