"""How commands write figures, times and texts that are not ours."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from asyncflow_core.flow.running.status import Status

__all__ = ["LIVE", "WIDTH", "clock", "count", "printable", "silence_s", "wrapped"]

WIDTH = 79
"""Of what is printed, in columns."""
LIVE = ("starting", "running")
"""States of a run that goes on."""
_LATE = 3.0
"""Periods without a new status after which a run that goes on is said to be silent."""


def silence_s(status: Status, now: float) -> float:
    """Seconds since a run that should go on was last heard; 0 if that is not long ago.

    Args:
        status: of the run.
        now: seconds since 1970.
    """
    age_s = now - status.time
    return age_s if status.state in LIVE and age_s > _LATE * max(1.0, status.every_s) else 0.0


def wrapped(head: str, text: str) -> Iterator[str]:
    """Lines of `head` and `text`, later ones indented by up to four columns."""
    indent = " " * min(len(head), 4)
    yield from textwrap.wrap(head + text, WIDTH, subsequent_indent=indent)


def count(number: float) -> str:
    """A count in a few characters, as 12.3k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.1f}{unit}"
    return f"{number:.0f}"


def clock(seconds: float) -> str:
    """[hours:]minutes:seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def printable(text: str, keep: str = "") -> str:
    r"""A text that somebody else wrote, its control and invisible characters as escapes.

    A response may hold what moves a terminal's cursor, turns the direction of a line, or cannot be
    encoded.

    Args:
        text: any.
        keep: characters left as they are, as "\n".
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )
