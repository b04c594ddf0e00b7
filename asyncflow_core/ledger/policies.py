"""Lease policies: which of the ready groups a requester gets first.

A policy never decides *whether* a row may be handed out, only the order among those that may be;
batches, versions and staleness are the queue's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from asyncflow_core.batch import GroupKey
from asyncflow_core.ledger.rows import Group, View, samples_in

__all__ = ["Budget", "Candidate", "Fifo", "LeasePolicy", "StalestFirst", "TokenBalanced"]


class Candidate:
    """The ready rows of one group."""

    __slots__ = ("group", "mask", "view")

    def __init__(self, group: Group, view: View) -> None:
        """The rows of `group` that a task, by its view, is offered."""
        self.group = group
        self.view = view
        self.mask = view.offered

    @property
    def key(self) -> GroupKey:
        """The prompt group."""
        return self.group.key

    @property
    def rows(self) -> int:
        """How many rows are ready."""
        return self.mask.bit_count()

    @property
    def tokens(self) -> int:
        """Their tokens together."""
        return self.group.tokens_in(self.mask)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version among them; None when none has a response."""
        return self.group.oldest_in(self.mask)


class LeasePolicy(Protocol):
    """Orders what is at the head of the queue.

    Attributes:
        window: how many groups the policy sees at a time; it bounds what a lease costs.
    """

    window: int

    def order(
        self, candidates: Sequence[Candidate], *, requester: str, holders: Mapping[str, int]
    ) -> Sequence[Candidate]:
        """All candidates, in the order in which they are handed out.

        Args:
            candidates: up to `window` groups, first of the queue first.
            requester: who asks.
            holders: rows of the task that each requester holds now.
        """


class Fifo:
    """In the queue's own order."""

    window = 1

    def order(
        self, candidates: Sequence[Candidate], *, requester: str, holders: Mapping[str, int]
    ) -> Sequence[Candidate]:
        """As they come."""
        return candidates


class StalestFirst:
    """What the oldest weights produced goes first, so that it does not grow older."""

    window = 64

    def order(
        self, candidates: Sequence[Candidate], *, requester: str, holders: Mapping[str, int]
    ) -> Sequence[Candidate]:
        """By oldest version; rows without a response last; else as they come."""

        def age(candidate: Candidate) -> float:
            version = candidate.oldest_version
            return math.inf if version is None else version

        return sorted(candidates, key=age)


class TokenBalanced:
    """Evens the tokens that requesters hold: who holds less than the mean gets the longest rows."""

    window = 64

    def order(
        self, candidates: Sequence[Candidate], *, requester: str, holders: Mapping[str, int]
    ) -> Sequence[Candidate]:
        """By tokens a row: falling for a requester who holds little, rising for the others."""
        others = [rows for name, rows in holders.items() if name != requester]
        little = not others or holders.get(requester, 0) <= sum(others) / len(others)
        return sorted(candidates, key=lambda c: c.tokens / c.rows, reverse=little)


class Budget:
    """What is left of a lease's limits. The first row or group always fits.

    Attributes:
        full: nothing more goes in.
    """

    __slots__ = ("_rows", "_started", "_tokens", "full")

    def __init__(self, limit_rows: int | None, limit_tokens: int | None) -> None:
        """None is without limit."""
        self._rows = math.inf if limit_rows is None else limit_rows
        self._tokens = math.inf if limit_tokens is None else limit_tokens
        self._started = False
        self.full = False

    @property
    def window(self) -> int:
        """Groups worth looking at next: no more than may fit, nor too many to put back."""
        return 16 if self._rows == math.inf else max(1, min(64, int(self._rows)))

    def take(self, candidate: Candidate, *, whole: bool) -> int:
        """The rows of a candidate that still fit; all or none of them when `whole`."""
        group, mask = candidate.group, candidate.mask
        if self.full:
            return 0
        if whole:
            return mask if self._spend(candidate.rows, candidate.tokens) else 0
        taken = 0
        for sample in samples_in(mask):
            if not self._spend(1, group.facts[sample]):
                break
            taken |= 1 << sample
        return taken

    def _spend(self, rows: int, tokens: int) -> bool:
        if self._started and (rows > self._rows or tokens > self._tokens):
            self.full = True
            return False
        self._started = True
        self._rows -= rows
        self._tokens -= tokens
        self.full = self._rows <= 0
        return True
