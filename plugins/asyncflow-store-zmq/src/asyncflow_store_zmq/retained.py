"""Trained rows that wait for a checkpoint. Pure.

A row that a trainer committed at version v is needed again if the model is loaded at an older one.
So its payload is kept, holding no credit, until a checkpoint covers v. Rows are masks by block.
"""

from __future__ import annotations

from collections import defaultdict

from asyncflow_core.ledger import Block

__all__ = ["Retained"]


class Retained:
    """Which rows which version trained, and those of them that live no more.

    Attributes:
        version: of the last checkpoint; -1 before the first.
        kept: block number to its block and the rows of it that are gone and kept.
        trained: block number to version to rows.
    """

    def __init__(self) -> None:
        """Nothing trained."""
        self.version = -1
        self.kept: dict[int, tuple[Block, int]] = {}
        self.trained: dict[int, dict[int, int]] = defaultdict(dict)

    def note(self, block: int, mask: int, version: int) -> None:
        """Rows were trained."""
        versions = self.trained[block]
        versions[version] = versions.get(version, 0) | mask

    def rows_of(self, block: int) -> int:
        """The rows of a block that are gone and kept."""
        return self.kept[block][1] if block in self.kept else 0

    def keep(self, block: Block, mask: int) -> int:
        """Rows are gone; which of them are kept."""
        versions = self.trained.get(block.number, {})
        later = 0
        for version, rows in versions.items():
            later |= rows if version > self.version else 0
        kept = mask & later
        self._clear(block.number, mask & ~later)
        if kept:
            self.kept[block.number] = block, self.rows_of(block.number) | kept
        return kept

    def checkpoint(self, version: int) -> list[tuple[Block, int, int]]:
        """The model was saved; what nobody needs any more: block, rows, and those still kept."""
        self.version = max(self.version, version)
        covered = []
        for number, (block, kept) in list(self.kept.items()):
            rows = kept & self._trained(number, above=-1, up_to=self.version)
            if rows:
                self._clear(number, rows)
                self._unkeep(number, rows)
                covered.append((block, rows, kept & ~rows))
        return covered

    def take_above(self, version: int) -> list[tuple[Block, int]]:
        """Kept rows that later versions trained; kept no more."""
        found = []
        for number, (block, kept) in list(self.kept.items()):
            rows = kept & self._trained(number, above=version)
            if rows:
                self._clear(number, rows)
                self._unkeep(number, rows)
                found.append((block, rows))
        return found

    def forget_above(self, number: int, version: int) -> int:
        """Rows of a block that later versions trained; they are not trained any more."""
        rows = self._trained(number, above=version)
        self._clear(number, rows)
        return rows

    def _trained(self, number: int, *, above: int, up_to: int | None = None) -> int:
        found = 0
        for version, rows in self.trained.get(number, {}).items():
            if version > above and (up_to is None or version <= up_to):
                found |= rows
        return found

    def _clear(self, number: int, mask: int) -> None:
        """Forget which versions trained rows."""
        versions = self.trained.get(number)
        if versions is None or not mask:
            return
        for version in list(versions):
            versions[version] &= ~mask
            if not versions[version]:
                del versions[version]
        if not versions:
            del self.trained[number]

    def _unkeep(self, number: int, mask: int) -> None:
        block, kept = self.kept.pop(number)
        if kept & ~mask:
            self.kept[number] = block, kept & ~mask
