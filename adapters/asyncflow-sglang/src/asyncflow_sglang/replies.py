"""What SGLang's /generate streams, as tokens and versions. Pure.

A chunk tells of all tokens so far or of new ones only, by a server's setting; which of the two it
is follows from its counts. Only the last chunk says which tokens came from which weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncflow_core.errors import EngineError

__all__ = ["Finish", "Labels", "Segment"]


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a request ended on its server.

    Attributes:
        kind: "stop", "length" or "abort".
        message: the server's, for an abort.
        status: HTTP status where the server gave the abort one, else 0: somebody asked for it.
    """

    kind: str
    message: str = ""
    status: int = 0


@dataclass(frozen=True, slots=True)
class Labels:
    """Names of versions on servers: unlike those of any other run, or life of a run.

    Attributes:
        tag: this rollout's own.
    """

    tag: str

    @property
    def started(self) -> str:
        """Of servers that this rollout started, before it gave them any weights."""
        return f"started.{self.tag}"

    @property
    def loading(self) -> str:
        """Of weights that are being replaced: nobody may take what is there for a version."""
        return f"loading.{self.tag}"

    def mine(self, label: str) -> bool:
        """Whether this rollout gave it."""
        return label.partition(".")[2] == self.tag

    def of(self, version: int) -> str:
        """The name under which a server is given a version."""
        return f"{version}.{self.tag}"

    def version(self, label: str) -> int | None:
        """The version, None for weights that are not of this rollout."""
        number, _, tag = label.partition(".")
        return int(number) if tag == self.tag and number.isdigit() else None


@dataclass(slots=True)
class Segment:
    """What one server made of one request.

    Attributes:
        ids, logprobs: of the tokens so far.
        spans: (label, count) runs over them; empty before the end.
        finish: None while it goes on.
        broke: why it ended without a finish.
        unreachable: whether that was since nobody listens there.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    finish: Finish | None = None
    broke: str = ""
    unreachable: bool = False

    def take(self, reply: Mapping[str, Any]) -> int:
        """Add a chunk; returns how many tokens were new.

        Raises:
            EngineError: a chunk that does not fit what came before, or is not SGLang's.
        """
        try:
            meta = reply["meta_info"]
            total = int(meta["completion_tokens"])
            entries = meta.get("output_token_logprobs") or []
            fresh = self._fresh(entries, total)
            self.ids.extend(int(entry[1]) for entry in fresh)
            self.logprobs.extend(float(entry[0]) for entry in fresh)
            ended = meta["finish_reason"]
            if ended is not None:
                self.finish = _finish(ended)
                self.spans = _spans(meta, total)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(
                f"not a reply of SGLang's /generate ({error!r}): {str(reply)[:300]}"
            ) from error
        return len(fresh)

    def _fresh(self, entries: Sequence[Any], total: int) -> Sequence[Any]:
        have = len(self.ids)
        if have + len(entries) == total:
            return entries
        if len(entries) == total:
            return entries[have:]
        raise ValueError(
            f"{len(entries)} log-probs came for {total} tokens, of which {have} were known"
        )


def _finish(ended: Mapping[str, Any]) -> Finish:
    kind = str(ended["type"])
    if kind not in ("stop", "length", "abort"):
        raise ValueError(f"finish reason {kind!r}")
    return Finish(kind, str(ended.get("message") or ""), int(ended.get("status_code") or 0))


def _spans(meta: Mapping[str, Any], total: int) -> list[tuple[str, int]]:
    spans = [
        (str(span["version"]), int(span["end"]) - int(span["start"]))
        for span in meta.get("weight_versions") or ()
    ]
    spans = [(label, count) for label, count in spans if count]
    if not spans and total:
        spans = [(str(meta["weight_version"]), total)]
    if sum(count for _, count in spans) != total:
        raise ValueError(f"version spans {spans} over {total} tokens")
    return spans
