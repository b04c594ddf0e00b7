"""Which SGLang versions are spoken to, and what is said to others."""

from __future__ import annotations

import logging
import re

from asyncflow_core.errors import EngineError

__all__ = ["OLDEST", "TESTED", "check_version"]

_log = logging.getLogger(__name__)

OLDEST = (0, 5, 23)
"""The first version with update sessions, three pause modes and per-token version spans, all of
which this adapter relies on."""
TESTED = (0, 5, 23)
"""The newest version the test suite was run against."""
_NEXT = (0, 6)


def check_version(version: str, *, server: str) -> None:
    """Refuse what is too old; warn of what is newer than the declared range.

    Raises:
        EngineError: older than `OLDEST`, or no version at all.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(?:post)?(\d+))?", version)
    parts = tuple(int(part or 0) for part in found.groups()) if found else ()
    allowed = f">={_text(OLDEST)},<{_text(_NEXT)}"
    if parts < OLDEST:
        raise EngineError(
            f"{server} runs SGLang {version or 'of unknown version'}, allowed: {allowed}; older "
            f"ones have no weight-update sessions (begin_weight_update) and do not say which "
            f"tokens came from which weights; upgrade the server: pip install 'sglang{allowed}'",
            service=server,
        )
    if parts >= _NEXT:
        _log.warning(
            "%s runs SGLang %s; this adapter is declared for %s and was tested with %s",
            server,
            version,
            allowed,
            _text(TESTED),
        )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
