"""Trained rows that wait for a checkpoint. Pure.

A row that a trainer committed at version v is needed again if the model is loaded at an older one.
So its group's payload is kept, holding no credit, until a checkpoint covers v.
"""

from __future__ import annotations

from collections import defaultdict

from asyncflow_core.ledger import Group

__all__ = ["Retained"]


class Retained:
    """Which rows which version trained, and the groups of which no row lives any more.

    Attributes:
        version: of the last checkpoint; -1 before the first.
        groups: what is kept, by number.
    """

    def __init__(self) -> None:
        """Nothing trained."""
        self.version = -1
        self.groups: dict[int, Group] = {}
        self.versions: dict[int, dict[int, int]] = defaultdict(dict)  # group to sample to version

    def trained(self, group: int, sample: int, version: int) -> None:
        """A row was trained."""
        self.versions[group][sample] = version

    def keep(self, group: Group) -> bool:
        """No row of a group lives any more; whether it is kept."""
        versions = self.versions.get(group.number)
        if not versions or max(versions.values()) <= self.version:
            self.versions.pop(group.number, None)
            return False
        self.groups[group.number] = group
        return True

    def checkpoint(self, version: int) -> list[Group]:
        """The model was saved; groups that nobody needs any more."""
        self.version = max(self.version, version)
        covered = [
            number for number in self.groups if max(self.versions[number].values()) <= self.version
        ]
        for number in covered:
            del self.versions[number]
        return [self.groups.pop(number) for number in covered]

    def take_above(self, version: int) -> list[tuple[Group, int]]:
        """Kept groups with rows that later versions trained, and those rows; kept no more."""
        found = []
        for number in list(self.groups):
            samples = [s for s, v in self.versions[number].items() if v > version]
            if samples:
                found.append((self.groups.pop(number), sum(1 << sample for sample in samples)))
                del self.versions[number]
        return found

    def forget_above(self, number: int, version: int) -> list[int]:
        """Samples of a living group that later versions trained; they are not trained any more."""
        versions = self.versions.get(number)
        if versions is None:
            return []
        samples = [sample for sample, trained in versions.items() if trained > version]
        for sample in samples:
            del versions[sample]
        if not versions:
            del self.versions[number]
        return samples
