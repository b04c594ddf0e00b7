"""Whatever arrives, decoding ends with a value or a `WireDecodeError`, in little memory."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_core.batch import Batch, Column, Key
from asyncflow_core.errors import WireDecodeError
from asyncflow_core.services.data_store import Lease, RowInfo, StoreStats
from asyncflow_core.services.rollout import GenerateRequest
from asyncflow_core.wire import decode, encode

TYPES = st.sampled_from(
    [Any, Batch, Lease, StoreStats, GenerateRequest, Key, list[int], dict[str, Batch]]
)
BATCH = Batch(
    {
        "prompt_ids": Column.ragged([np.arange(n, dtype=np.int32) for n in (3, 500)]),
        "reward": Column.dense(np.zeros(2, np.float32)),
        "finish_reason": Column.objects(["stop", {"a": [1.5, None]}]),
    }
)
LEASE = Lease(1, "t", "r", 3, 60.0, (RowInfo(4, Key(0, 0, 1, 2)),))


def attempt(frames: list[bytes], annotation: Any) -> None:
    with contextlib.suppress(WireDecodeError):
        decode(frames, annotation)


@given(st.lists(st.binary(max_size=200), max_size=4), TYPES)
def test_random_bytes_never_give_another_error(frames: list[bytes], annotation: Any) -> None:
    attempt(frames, annotation)


@settings(max_examples=300)
@given(st.data())
def test_mutated_messages_never_give_another_error(data: st.DataObject) -> None:
    value, annotation = data.draw(st.sampled_from([(BATCH, Batch), (LEASE, Lease)]))
    frames = [bytearray(frame) for frame in encode(value)]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = data.draw(st.sampled_from(frames))
        if not frame:
            continue
        place = data.draw(st.integers(0, len(frame) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert", "drop frame", "repeat frame"])):
            case "set":
                frame[place] = data.draw(st.integers(0, 255))
            case "cut":
                del frame[place:]
            case "insert":
                frame[place:place] = data.draw(st.binary(max_size=10))
            case "drop frame" if len(frames) > 1:
                frames.pop()
            case _:
                frames.append(bytearray(frame))
    attempt([bytes(frame) for frame in frames], annotation)


def array(code: int, shape: tuple[int, ...], rest: bytes = b"", ext: int = 2) -> Any:
    start = struct.pack(f"<BB{len(shape)}Q", code, len(shape), *shape)
    return msgpack.ExtType(ext, start + rest)


FRAME0 = struct.pack("<I", 0)


@pytest.mark.parametrize(
    ("header", "frames", "text"),
    [
        ([array(8, (10,), FRAME0, 3), array(8, (10,), FRAME0, 3)], [bytes(80)], "used twice"),
        ([array(8, (10,), struct.pack("<I", 7), 3)], [bytes(80)], "not there"),
        ([array(8, (10,), b"\0", 3)], [bytes(80)], "truncated"),
        ([1], [bytes(80)], "belongs to no array"),
        ([array(8, (11,), FRAME0, 3)], [bytes(80)], "is not 80 bytes"),
        ([array(8, (2**63, 2), b"")], [], "is not 0 bytes"),
        ([array(8, (2**32, 2**32), bytes(8))], [], "is not 8 bytes"),
        ([array(8, (0, 2**62), b"")], [], "does not decode"),
        ([array(12, (1,), bytes(8))], [], "dtype code 12 is unknown"),
        ([msgpack.ExtType(2, b"\x08")], [], "truncated"),
        ([msgpack.ExtType(2, b"\x08\x02" + bytes(8))], [], "truncated"),
        ([array(8, (1,) * 9, bytes(8))], [], "9 axes"),
        ([msgpack.ExtType(1, bytes(15))], [], "packed key"),
        ([msgpack.ExtType(99, b"")], [], "unknown extension"),
        ([msgpack.Timestamp(1, 1)], [], "Timestamp"),
        ({1.5: 2}, [], "a key that is no"),
        ({None: 2}, [], "a key that is no"),
    ],
)
def test_hostile_headers_are_refused_in_words(header: Any, frames: list[bytes], text: str) -> None:
    with pytest.raises(WireDecodeError, match=text):
        decode([msgpack.packb(header), *frames])


@pytest.mark.parametrize(
    "header",
    [
        b"\xdd\x00\x0f\xff\xff" * 900,
        b"\xdf\x00\x0f\xff\xff" * 900,
        b"\x91" * 1000 + b"\x01",
        b"\x91" * 100_000,
        b"\xc6\xff\xff\xff\xff" + bytes(100),
        b"\xc1",
        b"",
        b"\x81\x91\x01\x02",
        b"\x01\x02",
    ],
    ids=["lists", "maps", "deep", "deeper", "long", "invalid", "empty", "list as key", "two"],
)
def test_announced_sizes_cost_no_memory(header: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireDecodeError):
            decode([header])
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
