"""Counting the seconds in which something was going on."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

__all__ = ["Busy"]


class Busy:
    """Seconds during which at least one `with` block of it was open, the open one included."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing yet; `clock` gives seconds that never run back."""
        self._clock = clock
        self._open = 0
        self._since = 0.0
        self._closed_s = 0.0

    @property
    def seconds(self) -> float:
        """Until now."""
        return self._closed_s + (self._clock() - self._since if self._open else 0.0)

    def __enter__(self) -> Busy:
        if not self._open:
            self._since = self._clock()
        self._open += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open -= 1
        if not self._open:
            self._closed_s += self._clock() - self._since
