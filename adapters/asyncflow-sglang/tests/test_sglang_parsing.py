"""Replies, requests, health, versions: what needs no server."""

import logging
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_helpers import make_requests

from asyncflow_core.batch import Key
from asyncflow_core.errors import DataError, EngineError
from asyncflow_core.services.rollout import Completion, GenerateRequest, SamplingParams
from asyncflow_sglang._compat import check_version
from asyncflow_sglang.health import Health, State
from asyncflow_sglang.replies import Finish, Labels, Segment
from asyncflow_sglang.trajectory import Limits, Trajectory, check_request


def chunk(ids, total, *, finish=None, spans=None, version="0.x"):
    meta = {
        "completion_tokens": total,
        "finish_reason": finish,
        "weight_version": version,
        "output_token_logprobs": [[-float(i) / 10, i, None] for i in ids],
    }
    if spans is not None:
        meta["weight_versions"] = [
            {"version": v, "start": start, "end": end} for v, start, end in spans
        ]
    return {"meta_info": meta, "output_ids": ids}


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    cumulative=st.booleans(),
    cut=st.integers(0, 30),
)
def test_chunks_of_either_kind_give_every_token_once(lengths, cumulative, cut):
    total = sum(lengths)
    ids, segment, have = list(range(total)), Segment(), 0
    cut = min(cut, total)
    for number, length in enumerate(lengths):
        last = number == len(lengths) - 1
        new = ids[: have + length] if cumulative else ids[have : have + length]
        have += length
        spans = [("0.x", 0, cut), ("1.x", cut, total)] if last else None
        fresh = segment.take(
            chunk(new, have, finish={"type": "length"} if last else None, spans=spans)
        )
        assert fresh == length
    assert segment.ids == ids
    assert segment.logprobs == [-i / 10 for i in ids]
    assert segment.finish == Finish("length")
    assert segment.spans == [s for s in (("0.x", cut), ("1.x", total - cut)) if s[1]]


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"meta_info": {}},
        chunk([1], 3),
        chunk([1], 1, finish={"type": "eaten"}),
        chunk([1], 1, finish={"type": "stop"}, spans=[("0.x", 0, 2)]),
    ],
)
def test_reply_that_does_not_fit_is_an_engine_error(reply):
    with pytest.raises(EngineError, match="not a reply"):
        Segment().take(reply)


def test_abort_tells_an_answer_to_us_from_the_servers_own():
    ours, own = Segment(), Segment()
    ours.take(chunk([], 0, finish={"type": "abort", "message": "Aborted"}))
    full = {"type": "abort", "message": "queue is full", "status_code": 503}
    own.take(chunk([], 0, finish=full))
    assert ours.finish == Finish("abort", "Aborted")
    assert own.finish == Finish("abort", "queue is full", 503)
    assert ours.spans == []


def test_labels_are_read_back_by_their_own_rollout_only():
    labels = Labels("a1")
    assert labels.version(labels.of(17)) == 17
    for other in ("default", "17", "17.b2", "x.a1", "", "-1.a1"):
        assert labels.version(other) is None


def completion(tokens, versions):
    zeros = np.zeros(tokens, np.float32)
    ids = np.arange(tokens, dtype=np.int32)
    return Completion(Key(0, 0, 0, 0), ids, zeros, np.array(versions, np.int32), "abort")


def request(prompt=(1, 2), prefix=None, **sampling):
    ids = np.array(prompt, np.int32)
    return GenerateRequest(Key(0, 0, 0, 0), ids, SamplingParams(**sampling), 5, prefix)


LIMITS = Limits(vocab=10, tokens=20)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request(()), "prompt_ids is empty"),
        (request((1, 10)), "token 10, allowed: 0..9"),
        (request((1, -1)), "token -1"),
        (request(max_new_tokens=8, stop_token_ids=(10,)), "stop_token_ids holds token 10"),
        (request(max_new_tokens=0), "max_new_tokens is 0"),
        (request(max_new_tokens=19), "allowed: at most 20"),
        (request(max_new_tokens=8, temperature=-1.0), "temperature"),
        (request(max_new_tokens=8, temperature=math.nan), "temperature"),
        (request(max_new_tokens=8, top_p=0.0), "top_p"),
        (request(max_new_tokens=8, top_k=-1), "top_k"),
        (request(max_new_tokens=8, min_p=2.0), "min_p"),
        (request(max_new_tokens=3, prefix=completion(3, [[0, 3]])), "prefix has 3 tokens"),
        (request(max_new_tokens=8, prefix=completion(3, [[0, 2]])), "versions of 2"),
    ],
)
def test_request_that_no_server_could_take_is_refused_by_key(bad, words):
    with pytest.raises(DataError, match=words) as raised:
        check_request(bad, LIMITS)
    assert str(bad.key) in str(raised.value)


def test_request_with_stop_strings_needs_a_tokenizer():
    asked = request(max_new_tokens=4, stop=("x",))
    check_request(asked, LIMITS)
    with pytest.raises(DataError, match="stop_token_ids"):
        check_request(asked, Limits(10, 20, stop_strings=False))


def test_trajectory_goes_on_from_what_it_has():
    asked = request(
        (1, 2), completion(3, [[4, 3]]), max_new_tokens=8, top_k=3, stop=("x",), stop_token_ids=(9,)
    )
    trajectory = Trajectory(asked, ends=(7,))
    trajectory.extend([5, 6], [-1.0, -2.0], [(4, 1), (6, 1)])
    body = trajectory.body("id", "6.x", seeds=True, interval=4)
    assert body["input_ids"] == [1, 2, 0, 1, 2, 5, 6]
    params = body["sampling_params"]
    assert params["max_new_tokens"] == trajectory.left == 3
    assert (params["top_k"], params["stop"], params["stop_token_ids"]) == (3, ["x"], [7, 9])
    assert params["sampling_seed"] == 5
    assert body["extra_key"] == "6.x"
    ended = trajectory.completion("length")
    assert ended.versions.tolist() == [[4, 4], [6, 1]]
    assert ended.behaviour_logprobs.tolist() == [0, 0, 0, -1, -2]
    assert len(ended.response_ids) == 5


def test_body_without_extras_leaves_them_out():
    body = Trajectory(make_requests(1)[0]).body("id", "0.x", seeds=False, interval=1)
    params = body["sampling_params"]
    assert not {"stop", "stop_token_ids", "sampling_seed"} & params.keys()
    assert params["top_k"] == -1


@pytest.mark.parametrize("version", ["0.4.9", "0.5.22.post1", "0.5.2", "", "unknown"])
def test_version_too_old_is_refused_in_words(version):
    with pytest.raises(EngineError, match="begin_weight_update") as raised:
        check_version(version, server="s")
    assert "pip install 'sglang>=0.5.23,<0.6'" in str(raised.value)


def test_version_in_range_passes_and_a_newer_one_warns(caplog):
    with caplog.at_level(logging.WARNING):
        check_version("0.5.23", server="s")
        check_version("0.5.24.post1", server="s")
        assert not caplog.records
        check_version("0.6.0", server="s")
    assert "was tested with 0.5.23" in caplog.text


def test_health_only_proof_makes_ready_and_one_answer_does_not():
    health = Health(0.0)
    health.missed("refused", 1.0, refused=True)
    health.doubted("an update failed", 1.5)
    assert (health.state, health.reason) == (State.STARTING, "refused")
    health.answered("default", 2.0)
    assert health.state is State.STALE
    health.confirmed("0.x", 3.0)
    health.answered("0.x", 4.0)
    assert health.state is State.READY
    health.answered("default", 5.0)  # it was restarted between two looks
    assert (health.state, health.label) == (State.STALE, None)


def test_health_slow_answers_are_borne_a_closed_port_is_not():
    health = Health(0.0)
    health.answered("0.x", 0.0)
    health.confirmed("0.x", 0.0)
    for _ in range(2):
        health.missed("slow", 1.0, refused=False)
    assert health.state is State.READY
    health.answered("0.x", 2.0)
    for _ in range(3):
        assert health.state is State.READY
        health.missed("slow", 3.0, refused=False)
    assert health.state is State.LOST
    health.answered("0.x", 4.0)
    assert health.state is State.STALE
    health.confirmed("0.x", 5.0)
    health.missed("refused", 6.0, refused=True)
    assert (health.state, health.reason) == (State.LOST, "refused")
    health.doubted("an update failed", 7.0)
    assert health.state is State.LOST
    health.restarted(8.0)
    assert health.state is State.STARTING
