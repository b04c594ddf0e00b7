"""Which version of the weights generated which row: what is void when a run goes back. Pure.

Rows are masks by block, as in `retained.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from asyncflow_core.ledger import Block, span

__all__ = ["Lineage"]


class Lineage:
    """Of blocks whose rows have responses.

    Attributes:
        made: block number to newest version of the response to rows.
        tokens: block number to the tokens of each row's response.
    """

    def __init__(self) -> None:
        """Nothing generated."""
        self.made: dict[int, dict[int, int]] = {}
        self.tokens: dict[int, array[int]] = {}

    def note(self, block: Block, first: int, tokens: Sequence[int], version: int) -> None:
        """Rows from `first` on have responses of so many tokens."""
        last = first + len(tokens)
        versions = self.made.setdefault(block.number, {})
        versions[version] = versions.get(version, 0) | span(first, last)
        known = self.tokens.setdefault(block.number, array("i", bytes(4 * block.rows)))
        known[first:last] = array("i", tokens)

    def void(self, number: int, mask: int, version: int) -> int:
        """Rows of `mask` whose response is of a later version; they have none from now on."""
        versions = self.made.get(number, {})
        found = 0
        for made in [made for made in versions if made > version]:
            found |= versions[made] & mask
            versions[made] &= ~mask
            if not versions[made]:
                del versions[made]
        return found

    def forget(self, number: int) -> None:
        """A block is gone."""
        self.made.pop(number, None)
        self.tokens.pop(number, None)
