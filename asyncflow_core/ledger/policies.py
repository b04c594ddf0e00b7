"""Lease policies: which of the ready groups a requester gets first.

A policy never decides *whether* a row may be handed out, only the order among those that may be;
batches, versions and staleness are the queue's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from asyncflow_core.batch import GroupKey
from asyncflow_core.ledger.blocks import Block, View
from asyncflow_core.ledger.masks import bits_in, lowest

__all__ = ["Budget", "Candidate", "Fifo", "LeasePolicy", "StalestFirst", "TokenBalanced"]


class Candidate:
    """The ready rows of one group."""

    __slots__ = ("block", "mask", "view")

    def __init__(self, block: Block, view: View, mask: int) -> None:
        """The rows of a group that a task, by its view of the block, is offered."""
        self.block = block
        self.view = view
        self.mask = mask

    @property
    def key(self) -> GroupKey:
        """The prompt group."""
        return self.block.group_at(self.mask.bit_length() - 1)

    @property
    def rows(self) -> int:
        """How many rows are ready."""
        return self.mask.bit_count()

    @property
    def tokens(self) -> int:
        """Their tokens together."""
        return self.block.tokens_in(self.mask)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version among them; None when none has a response."""
        return self.block.oldest_in(self.mask)


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

    def take(self, block: Block, mask: int, *, whole: bool) -> int:
        """The first of some rows that still fit; by the group when `whole`."""
        whole = whole and block.admission.samples > 1
        endless = self._tokens == math.inf
        if endless and not whole and not self.full:
            return self._take_rows(mask)
        taken = 0
        for part in block.groups_in(mask) if whole else bits_in(mask):
            tokens = 0 if endless else block.tokens_in(part)
            if self.full or not self._spend(part.bit_count(), tokens):
                break
            taken |= part
        return taken

    def _take_rows(self, mask: int) -> int:
        """As many rows as there may be."""
        if self._rows < mask.bit_count():
            mask = lowest(mask, int(self._rows))
        self._spend(mask.bit_count(), 0)
        return mask

    def _spend(self, rows: int, tokens: int) -> bool:
        if self._started and (rows > self._rows or tokens > self._tokens):
            self.full = True
            return False
        self._started = True
        self._rows -= rows
        self._tokens -= tokens
        self.full = self._rows <= 0
        return True
