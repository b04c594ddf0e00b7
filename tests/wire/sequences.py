"""What a hostile client says: a sequence of messages, kept as JSON, mutated as bytes.

JSON, a file of `corpus/`: {"about": ..., "stranger": bool, "messages": [[frame, ...], ...]}. A
frame is hex digits, or a list of parts: hex digits, or [hex digits, times]. `stranger` is true
where the handshake is the file's own business; the others are said after a good one.

Bytes, what a fuzzer mutates: per frame a byte (1: another frame of the same message follows), its
length as u16, and so many bytes; a frame that is cut short ends the sequence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"

Message = tuple[bytes, ...]
_RUN = re.compile(rb"(.{1,5}?)\1{63,}", re.DOTALL)


@dataclass(frozen=True)
class Sequence:
    """One file."""

    about: str
    stranger: bool
    messages: tuple[Message, ...]


def load(path: Path) -> Sequence:
    """Read a file of the corpus."""
    fields = json.loads(path.read_text())
    messages = tuple(tuple(map(_frame, message)) for message in fields["messages"])
    return Sequence(fields["about"], fields.get("stranger", False), messages)


def _frame(frame: Any) -> bytes:
    parts = [frame] if isinstance(frame, str) else frame
    return b"".join(
        bytes.fromhex(part) if isinstance(part, str) else bytes.fromhex(part[0]) * part[1]
        for part in parts
    )


def to_bytes(messages: tuple[Message, ...]) -> bytes:
    """For a fuzzer to begin with; frames above 65535 bytes are cut."""
    found = bytearray()
    for message in messages:
        for number, frame in enumerate(message, 1):
            cut = frame[:65535]
            found += bytes([number < len(message)]) + len(cut).to_bytes(2, "little") + cut
    return bytes(found)


def from_bytes(data: bytes) -> Iterator[Message]:
    """The inverse, of any bytes."""
    frames: list[bytes] = []
    at = 0
    while at + 3 <= len(data):
        more, size = data[at] & 1, int.from_bytes(data[at + 1 : at + 3], "little")
        frames.append(data[at + 3 : at + 3 + size])
        at += 3 + size
        if not more:
            yield tuple(frames)
            frames = []
    if frames:
        yield tuple(frames)


def write(path: Path, sequence: Sequence) -> None:
    """Keep a sequence."""
    fields: dict[str, Any] = {"about": sequence.about}
    if sequence.stranger:
        fields["stranger"] = True
    fields["messages"] = [[_digits(frame) for frame in message] for message in sequence.messages]
    path.write_text(json.dumps(fields, indent=1) + "\n")


def _digits(frame: bytes) -> Any:
    parts: list[Any] = []
    at = 0
    for run in _RUN.finditer(frame):
        if run.start() > at:
            parts.append(frame[at : run.start()].hex())
        unit = run[1]
        parts.append([unit.hex(), len(run[0]) // len(unit)])
        at = run.end()
    if at < len(frame) or not parts:
        parts.append(frame[at:].hex())
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts
