from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from asyncflow_core.batch import Batch, BatchRef, Column, GroupKey, Key
from asyncflow_core.errors import DataError, WireDecodeError
from asyncflow_core.services.data_store import DroppedGroup, Lease, RowInfo, StoreStats, TaskStats
from asyncflow_core.services.rollout import (
    Completion,
    GenerateRequest,
    RolloutCapabilities,
    SamplingParams,
    SwitchMode,
)
from asyncflow_core.services.weight_sync import PublishedWeights, TensorSpec, WeightManifest
from asyncflow_core.wire import Encoder, Limits, decode, encode

DTYPES = st.sampled_from(["?", "u1", "i1", "<u2", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8"])
ARRAYS = DTYPES.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0))
)
KEYS = st.builds(
    Key,
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**16 - 1),
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=2000)
    | KEYS
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text() | KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    rows = draw(st.integers(0, 5))
    columns = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=8), max_size=4, unique=True)):
        dtype = np.dtype(draw(DTYPES))
        match draw(st.sampled_from(["dense", "ragged", "object"])):
            case "dense":
                columns[name] = Column.dense(
                    draw(hnp.arrays(dtype, (rows, draw(st.integers(0, 200)))))
                )
            case "ragged":
                sizes = [draw(st.integers(0, 300)) for _ in range(rows)]
                columns[name] = Column.ragged([np.ones(size, dtype) for size in sizes], dtype)
            case _:
                columns[name] = Column.objects(draw(VALUES) for _ in range(rows))
    return Batch(columns, rows=rows)


def assert_same_column(left: Column, right: Column) -> None:
    assert left.kind == right.kind
    if left.kind == "object":
        assert left.values == right.values
        return
    assert left.array.dtype == right.array.dtype
    np.testing.assert_array_equal(left.array, right.array)
    np.testing.assert_array_equal(left.offsets, right.offsets)


def copied(frames: list[Any]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


@given(VALUES)
def test_plain_values_come_back_equal(value: Any) -> None:
    assert decode(copied(encode(value))) == value


@given(ARRAYS)
def test_arrays_come_back_bit_equal_and_read_only(array: NDArray[Any]) -> None:
    back = decode(copied(encode(array)))
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert back.flags.aligned
    assert not back.flags.writeable


@given(batches())
def test_batches_come_back_equal(batch: Batch) -> None:
    back = decode(copied(encode(batch)), Batch)
    assert back.rows == batch.rows
    assert list(back) == list(batch)
    for name in batch:
        assert_same_column(back[name], batch[name])


@pytest.mark.parametrize(
    "value",
    [
        Lease(
            1,
            "t",
            "r",
            3,
            60.0,
            (RowInfo(4, Key(0, 0, 1, 2)), RowInfo(5, Key(0, 0, 1, 3), 7, 9, 1)),
        ),
        StoreStats(
            rows=3,
            tasks={"t": TaskStats(holders={"r": 2})},
            dropped_groups=(DroppedGroup(1, GroupKey(0, 1, 2), None, "train", "why"),),
        ),
        BatchRef(1, 2, (3, 4)),
        SamplingParams(stop=("\n",), temperature=0),
        RolloutCapabilities(switch_modes=frozenset(SwitchMode)),
        PublishedWeights(
            WeightManifest(1, 2, (TensorSpec("w", "F32", (2, 3)),), "00", 24),
            "memory",
            {"a": [1, {}]},
        ),
        Key(1, 2, 3, 4),
        GroupKey(1, 2, 3),
        SwitchMode.DRAIN,
    ],
)
def test_records_of_the_contracts_come_back_equal(value: Any) -> None:
    assert decode(copied(encode(value)), type(value), strict=True) == value


def test_request_with_a_prefix_comes_back() -> None:
    ids = np.arange(1000, dtype=np.int32)
    prefix = Completion(
        Key(0, 0, 0, 0), ids, ids.astype(np.float32), np.array([[0, 1000]], np.int32), "abort"
    )
    request = GenerateRequest(Key(0, 0, 0, 0), ids, SamplingParams(), 2**63, prefix)
    back = decode(copied(encode(request)), GenerateRequest)
    assert back.seed == 2**63
    np.testing.assert_array_equal(back.prefix.response_ids, ids)


def test_large_arrays_travel_without_a_copy_on_either_side() -> None:
    array = np.arange(1000, dtype=np.float64)
    frames = encode([array, array[:3]])
    assert len(frames) == 2
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), array)
    assert np.shares_memory(decode(frames)[0], array)


def test_non_contiguous_array_comes_back_equal() -> None:
    array = np.arange(4000, dtype=np.int32).reshape(40, 100).T[::2]
    np.testing.assert_array_equal(decode(encode(array)), array)


def test_numpy_scalars_and_enums_become_plain_values() -> None:
    assert decode(encode([np.float32(0.5), np.int64(3), np.bool_(True), SwitchMode.DRAIN])) == [
        0.5,
        3,
        True,
        "drain",
    ]


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: 0,
        np.array(["stop"]),
        np.array([object()]),
        np.arange(3, dtype=">i4"),
        np.zeros(3, np.complex64),
        2**64,
        "\ud800",
        Key(2**20, 0, 0, 0),
        np.zeros((1,) * 9),
    ],
)
def test_what_cannot_be_sent_is_a_data_error_and_leaves_the_encoder_usable(value: Any) -> None:
    encoder = Encoder()
    with pytest.raises(DataError, match="sent"):
        encoder.encode(["before", np.zeros(1000), value])
    assert decode(encoder.encode([1])) == [1]


@dataclass(frozen=True)
class Older:
    a: int


@dataclass(frozen=True)
class Newer:
    a: int
    b: str = ""
    c: dict[str, int] | None = None
    d: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Strict:
    kind: Literal["x", "y"] = "x"
    ratio: float = 0.0
    ids: NDArray[np.int32] | None = None
    pairs: tuple[tuple[str, int], ...] = ()
    by_key: dict[Key, float] = field(default_factory=dict)


def test_fields_a_newer_peer_added_are_ignored_in_results_and_refused_in_arguments() -> None:
    frames = encode(Newer(1, b="used"))
    assert decode(frames, Older) == Older(1)
    with pytest.raises(WireDecodeError, match=r"value\.b: got str 'used', allowed: the fields of"):
        decode(frames, Older, strict=True)


def test_fields_at_their_default_are_not_sent_so_an_older_receiver_takes_them() -> None:
    @dataclass(frozen=True)
    class Added:
        a: int
        b: str = ""

    assert decode(encode(Added(1)), Older, strict=True) == Older(1)


def test_fields_an_older_peer_does_not_know_take_their_default() -> None:
    assert decode(encode(Older(1)), Newer, strict=True) == Newer(1)


@pytest.mark.parametrize(
    ("plain", "text"),
    [
        ({"kind": "z"}, r"value\.kind: got str 'z', allowed: one of \['x', 'y'\]"),
        ({"ratio": "1"}, r"value\.ratio: got str '1', allowed: float"),
        ({"ratio": True}, r"value\.ratio: got bool True, allowed: float"),
        ({"ids": np.zeros(2)}, r"value\.ids: got str 'float64', allowed: an array of dtype int32"),
        (
            {"pairs": [["a", 1], ["b", None]]},
            r"value\.pairs\.\[1\]: got NoneType None, allowed: int",
        ),
        ({"pairs": [["a"]]}, r"allowed: a list of 2 entries"),
        ({"by_key": {"a": 1.0}}, r"value\.by_key\.a: got str 'a', allowed: Key"),
        ([], r"value: got list, allowed: a map of the fields of Strict"),
    ],
)
def test_wrong_types_are_named_with_field_value_and_what_is_allowed(plain: Any, text: str) -> None:
    with pytest.raises(WireDecodeError, match=text):
        decode(encode(plain), Strict)


def test_missing_field_is_named() -> None:
    with pytest.raises(WireDecodeError, match=r"allowed: Older with its fields \['a'\]"):
        decode(encode({}), Older)


def test_dict_by_key_and_float_from_int_come_back() -> None:
    value = Strict(ratio=1, by_key={Key(0, 0, 0, 1): 2.0}, pairs=(("a", 1),))
    assert decode(encode(value), Strict) == value


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ({"values": np.zeros(3), "offsets": np.array([0, 2, 1, 3])}, "rise from 0 to the 3 values"),
        ({"values": np.zeros(3), "offsets": np.array([0, 4])}, "rise from 0"),
        ({"values": np.zeros(3), "offsets": np.array([], np.int64)}, "rise from 0"),
        (
            {"values": np.zeros(3), "offsets": np.array([0, 2**63 - 1, -(2**63), 3])},
            "rise from 0",
        ),
        ({"values": np.zeros(3), "offsets": np.array([0.0, 3.0])}, "offsets int64"),
        ({"values": np.float32(0)}, "an array with a row axis"),
        ({"values": [1], "offsets": np.array([0, 1])}, "an array with an axis"),
        ({"values": np.zeros(2), "rows": 2}, "a column"),
    ],
)
def test_hostile_columns_are_refused(column: Any, text: str) -> None:
    with pytest.raises(WireDecodeError, match=text):
        decode(encode({"rows": 1, "columns": {"c": column}}), Batch)


def test_columns_of_unequal_length_are_refused() -> None:
    columns = {"a": Column.objects([1]), "b": Column.objects([])}
    with pytest.raises(WireDecodeError, match="equal length"):
        decode(encode({"rows": 1, "columns": columns}), Batch)


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (Limits(frame_bytes=7999), "a frame has 8000 bytes, at most 7999"),
        (Limits(frames=1), "2 frames, at most 1"),
        (Limits(total_bytes=15_000), "bytes, at most 15000"),
        (Limits(header_bytes=20), "header has .* at most 20"),
    ],
)
def test_message_over_a_limit_is_refused_by_both_sides(limits: Limits, text: str) -> None:
    value = [np.zeros(1000), np.zeros(1000)]
    with pytest.raises(DataError, match=text):
        encode(value, limits)
    with pytest.raises(WireDecodeError, match=text):
        decode(encode(value), limits=limits)


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        ([[[1]]], Limits(depth=2)),
        ([[1], [[[]]]], Limits(depth=2)),
        ([1, 2, 3], Limits(items=2)),
        ({"a": 1, "b": 2}, Limits(items=1)),
        (np.zeros((1, 1, 1)), Limits(array_ndim=2)),
    ],
)
def test_value_over_a_limit_is_refused_by_both_sides(value: Any, limits: Limits) -> None:
    with pytest.raises(DataError):
        encode(value, limits)
    with pytest.raises(WireDecodeError):
        decode(encode(value), limits=limits)


@pytest.mark.parametrize("value", [{1.5: 1}, {None: 1}, {b"": 1}])
def test_map_keys_the_receiver_would_refuse_are_refused_here(value: Any) -> None:
    with pytest.raises(DataError, match="a key that is no string"):
        encode(value)


@pytest.mark.parametrize("size", [40, 900, 5000])
def test_lists_that_announce_more_than_is_there_are_refused_short_or_long(size: int) -> None:
    announced = b"\xdd" + (size - 1).to_bytes(4, "big")  # as many entries as a header has bytes
    header = announced * (size // 5) + b"\x01" * (size % 5)
    with pytest.raises(WireDecodeError):
        decode([header])
