"""The messages, and errors as messages.

Every message is a list that begins with its kind. From a client:

    HELLO wire_version token name       first; parsed alike in every wire version
    CALL id method timeout_s arguments
    STREAM id method timeout_s arguments window
    CREDIT id items                     `items` more of a stream were taken
    CANCEL id
    BYE                                 nothing follows

and from a server:

    WELCOME wire_version name catalogue
    REPLY id value                      ends a call
    ITEM id value
    END id                              ends a stream
    ERROR id code message               ends either
    NOOP                                finds out whether the client is there
    GOODBYE code message                the session is over, or was never begun
"""

from __future__ import annotations

from typing import Any, Final

from asyncflow_core import errors
from asyncflow_core.errors import AsyncFlowError, ConfigError, ServiceError, error_from_code

__all__ = ["WIRE_VERSION", "error_fields", "rebuild_error"]

WIRE_VERSION: Final = 1

HELLO: Final = 1
CALL: Final = 2
STREAM: Final = 3
CREDIT: Final = 4
CANCEL: Final = 5
BYE: Final = 6
WELCOME: Final = 16
REPLY: Final = 17
ITEM: Final = 18
END: Final = 19
ERROR: Final = 20
NOOP: Final = 21
GOODBYE: Final = 22

MAX_CALLS: Final = 1024
"""Calls and streams one client may have open."""
MAX_WINDOW: Final = 8
"""Items of a stream that may be under way."""
MAX_MESSAGE_CHARS: Final = 8192


def error_fields(error: BaseException) -> tuple[str, str]:
    """Code and message. Errors that are not ours count as the engine's."""
    for cls in type(error).__mro__:
        # A plugin may subclass our errors; the peer knows only ours.
        if cls.__module__ == errors.__name__ and issubclass(cls, AsyncFlowError):
            return cls.code, _message(str(error))
    return "engine", _message(f"{type(error).__name__}: {error}")


def rebuild_error(code: Any, message: Any, service: str) -> AsyncFlowError:
    """The error a peer sent, with the name of the service behind it."""
    error = error_from_code(str(code), str(message))
    if isinstance(error, ConfigError):
        return ConfigError(error.faults[0].split("\n"))
    if isinstance(error, ServiceError):
        error.service = service
    return error


def _message(text: str) -> str:
    return text.encode("utf-8", "replace").decode()[:MAX_MESSAGE_CHARS]
