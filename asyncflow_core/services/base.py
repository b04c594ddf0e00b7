"""What all four services share: a life cycle and declared capabilities."""

from __future__ import annotations

from abc import ABC
from types import TracebackType
from typing import ClassVar, Self

__all__ = ["Service"]


class Service(ABC):
    """Open, use, close.

    `open()` allocates what is costly (processes, memory, models); a constructor only keeps its
    arguments. `aclose()` is idempotent and safe after a failed `open()`. Calls before `open()` or
    after `aclose()` raise `ServiceClosedError`.
    """

    API_VERSION: ClassVar[int]

    async def open(self) -> None:  # noqa: B027 - a service that holds nothing need not override
        """Make the service ready for calls."""

    async def aclose(self) -> None:  # noqa: B027
        """Give back everything `open()` took."""

    async def __aenter__(self) -> Self:
        """Open; close again if opening fails."""
        try:
            await self.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        await self.aclose()
