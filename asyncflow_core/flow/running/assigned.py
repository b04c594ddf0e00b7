"""Which prompt group went to which batch: what a resumed run puts again, and what it draws next.

Every change is a record (a plain mapping), written down before the store sees the groups. Applying
a record twice changes nothing, so that a checkpoint and the records after it may overlap. Pure.

    {"batch": 3, "groups": [[0, 12], [0, 13]], "next": [0, 14], "last": "9f..."}    they went there
    {"batch": 3, "dropped": [[0, 12]]}                                              they are gone
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncflow_core.batch import GroupKey

__all__ = ["TRAINING", "Assigned", "dropped_record", "groups_record"]

TRAINING = 0
"""Source of training prompts, as keys number them."""


class Assigned:
    """The groups of batches that are not trained yet, and the place of the next prompt.

    Attributes:
        next: (epoch, sequence) of the first prompt never drawn.
        last: fingerprint of the prompt before it; empty before the first.
        closed: groups of trained batches, dropped ones included.
    """

    def __init__(self) -> None:
        """Nothing drawn."""
        self.next = (0, 0)
        self.last = ""
        self.closed = 0
        self._batches: dict[int, dict[tuple[int, int], bool]] = {}  # whether the group lives

    @property
    def groups(self) -> int:
        """Ever assigned."""
        return self.closed + sum(map(len, self._batches.values()))

    @property
    def dropped(self) -> int:
        """Groups of batches that are not trained which were dropped."""
        return sum(not lives for groups in self._batches.values() for lives in groups.values())

    def living(self, batch: int) -> list[GroupKey]:
        """The groups of a batch that were not dropped, in the order they came."""
        found = self._batches.get(batch, {})
        return [GroupKey(TRAINING, *place) for place, lives in found.items() if lives]

    def batches(self) -> list[int]:
        """Those that have groups, ascending."""
        return sorted(self._batches)

    def apply(self, record: Mapping[str, Any]) -> None:
        """Take one record."""
        batch = self._batches.setdefault(record["batch"], {})
        for epoch, sequence in record.get("groups", ()):
            batch.setdefault((epoch, sequence), True)
        for epoch, sequence in record.get("dropped", ()):
            batch[epoch, sequence] = False
        if "next" in record:
            epoch, sequence = record["next"]
            if (epoch, sequence) > self.next:
                self.next, self.last = (epoch, sequence), record["last"]

    def close(self, version: int) -> None:
        """Batches below `version` are trained and recorded: they are only counted."""
        for batch in [batch for batch in self._batches if batch < version]:
            self.closed += len(self._batches.pop(batch))

    def dump(self) -> dict[str, Any]:
        """Plain values, for `load`."""
        return {
            "closed": self.closed,
            "next": list(self.next),
            "last": self.last,
            "batches": [
                [batch, [[*place, lives] for place, lives in groups.items()]]
                for batch, groups in sorted(self._batches.items())
            ],
        }

    @classmethod
    def load(cls, dumped: Mapping[str, Any]) -> Assigned:
        """Inverse of `dump`."""
        made = cls()
        epoch, sequence = dumped["next"]
        made.next, made.last, made.closed = (epoch, sequence), dumped["last"], dumped["closed"]
        for batch, groups in dumped["batches"]:
            made._batches[batch] = {(e, s): lives for e, s, lives in groups}
        return made


def groups_record(
    batch: int, keys: Sequence[GroupKey], following: tuple[int, int], last: str
) -> dict[str, Any]:
    """Newly drawn groups go to a batch."""
    return {
        "batch": batch,
        "groups": [[key.epoch, key.sequence] for key in keys],
        "next": list(following),
        "last": last,
    }


def dropped_record(batch: int, keys: Iterable[GroupKey]) -> dict[str, Any]:
    """Groups of a batch are gone."""
    return {"batch": batch, "dropped": [[key.epoch, key.sequence] for key in keys]}
