"""Standard streams as a command finds them: closed, full, of few characters, unread."""

from __future__ import annotations

import contextlib
import io
import os
import sys

__all__ = ["forget_output", "output_is_gone", "ready_streams", "say"]


def ready_streams() -> None:
    """Have all three streams, and let them take any text.

    A stream that was closed before the start (`>&-`, some daemons) is replaced, in order: the
    lowest free descriptor is its own. Left free, it would go to a socket or a file of ours, and a
    process we start would write its output into that.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8"))
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def output_is_gone() -> bool:
    """Whether standard output takes nothing more.

    What a buffer holds is tried again; without one nothing is left to be tried, so a line is.
    """
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def forget_output() -> None:
    """Print into nothing from now on; the interpreter would fail again on what is left."""
    try:
        number = sys.stdout.fileno()
    except (AttributeError, io.UnsupportedOperation):  # it is no file: a test's, a notebook's
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def say(text: str) -> None:
    """Print on standard error; when that is gone, too, there is nobody left to tell."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
