"""What no real server of the supported version shows: a small HTTP server stands in."""

import asyncio
import socket
from types import SimpleNamespace

import pytest
from sglang_helpers import PROMPT, VOCAB, make_requests
from sglang_stand import Stand, make_rollout

from asyncflow_core.errors import (
    DataError,
    EngineError,
    PeerLostError,
    ServiceTimeoutError,
)
from asyncflow_core.parts import PartContext
from asyncflow_core.testing.aio import collect, eventually
from asyncflow_sglang import dispatch, server
from asyncflow_sglang.http import Http, RefusedError, UnreachableError
from asyncflow_sglang.launch import free_port


async def test_old_server_is_refused_at_open_in_words(model):
    async with Stand(version="0.5.22") as stand:
        with pytest.raises(EngineError, match=r"0\.5\.22, allowed: >=0\.5\.23,<0\.6"):
            await make_rollout(model, addresses=(stand.url,)).__aenter__()


async def test_server_with_plain_logprobs_is_refused_at_open(model):
    async with Stand(tempered=False) as stand:
        with pytest.raises(EngineError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
            await make_rollout(model, addresses=(stand.url,)).__aenter__()


async def test_server_with_several_tokenizer_workers_is_refused_at_open(model):
    async with Stand(workers=2) as stand:
        with pytest.raises(EngineError, match="2 tokenizer workers, allowed: 1"):
            await make_rollout(model, addresses=(stand.url,)).__aenter__()


async def test_nobody_there_is_named_at_open(model):
    address = ("http://127.0.0.1:9",)
    with pytest.raises(EngineError, match=r"server-0 \(http://127\.0\.0\.1:9\) is starting"):
        await make_rollout(model, addresses=address, start_timeout_s=0.5).__aenter__()


async def test_full_server_is_tried_again_and_a_broken_stream_goes_on(model):
    async with (
        Stand(refuses=2, broken=True) as stand,
        make_rollout(model, addresses=(stand.url,)) as service,
    ):
        (completion,) = await collect(service.generate(make_requests(1, max_new_tokens=2)))
    # Two refusals, one token of a stream that broke, and the rest.
    assert completion.response_ids.tolist() == [1, 1]
    assert [len(a["input_ids"]) - len(PROMPT) for a in stand.asked] == [0, 0, 0, 1]
    assert len({a["rid"] for a in stand.asked}) == 4
    assert {len(a["rid"]) for a in stand.asked} == {32}


async def test_tokens_of_weights_that_changed_behind_our_back_are_thrown_away(model):
    async with (
        Stand() as stand,
        make_rollout(model, addresses=(stand.url,), wait_s=1.0) as service,
    ):
        stand.label = "7"
        with pytest.raises(ServiceTimeoutError, match="of another run"):
            await collect(service.generate(make_requests(1, max_new_tokens=2)))
        assert (await service.stats()).tokens_lost >= 1


async def test_requests_wait_by_name_while_no_server_is_there(model):
    async with Stand() as stand:
        service = make_rollout(model, addresses=(stand.url,), wait_s=1.0)
        async with service:
            await stand.down()
            (server,) = service._servers.values()
            await eventually(lambda: not server.ready)
            words = r"1 requests of rollout wait since \d s for a server: rollout/server-0 \(.*lost"
            with pytest.raises(ServiceTimeoutError, match=words):
                await collect(service.generate(make_requests(1)))


async def test_http_errors_tell_refusals_from_silence():
    async with Stand() as stand:
        http = Http(stand.url)
        with pytest.raises(UnreachableError):
            await http.get("/model_info", timeout_s=1)
        http.open()
        try:
            stand.extra["/nowhere"] = (404, "")
            with pytest.raises(RefusedError) as refused:
                await http.get("/nowhere", timeout_s=5)
            assert refused.value.status == 404
            with pytest.raises(UnreachableError):
                await http.get("/model_info", timeout_s=0.0)
            found = await http.get("/model_info", timeout_s=5)
            assert found["weight_version"] == "default"
            await stand.down()
            with pytest.raises(UnreachableError) as gone:
                await http.get("/model_info", timeout_s=5)
            assert gone.value.refused
        finally:
            await http.aclose()
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("path", "status", "text", "words"),
    [
        ("/model_info", 404, "not here", "has no /model_info; give the address of an SGLang"),
        ("/model_info", 401, "{}", "wants another API key; api_key_env is ''"),
        ("/model_info", 200, "<html>", "is this the address of an SGLang server"),
        ("/model_info", 200, '{"model": "gpt"}', "gives no weight_version"),
        ("/server_info", 200, "[]", "gives no version"),
        ("/server_info", 200, '{"version": "0.5.23"}', "gives no max_req_input_len"),
        ("/generate", 200, '{"text": "x"}', "gives no output_top_logprobs"),
    ],
)
async def test_wrong_address_is_refused_at_open_at_once(model, path, status, text, words):
    async with Stand() as stand:
        stand.extra[path] = (status, text)
        with pytest.raises(EngineError, match=words) as raised:
            await make_rollout(model, addresses=(stand.url,)).__aenter__()
        assert stand.url in str(raised.value)


@pytest.mark.parametrize(
    ("status", "text"), [(500, "CUDA error"), (200, "{not json"), (503, "loading")]
)
async def test_server_that_may_still_come_is_waited_for_and_its_answer_named(model, status, text):
    async with Stand() as stand:
        stand.extra["/model_info"] = (status, text)
        words = r"cannot be opened: .* is starting since \d s: .*/model_info"
        with pytest.raises(EngineError, match=words):
            await make_rollout(model, addresses=(stand.url,), start_timeout_s=0.5).__aenter__()
        opening = asyncio.ensure_future(make_rollout(model, addresses=(stand.url,)).__aenter__())
        await asyncio.sleep(0)
        del stand.extra["/model_info"]
        await (await opening).aclose()


async def test_server_of_another_architecture_is_refused_at_open(model):
    async with Stand() as stand:
        stand.architectures = ["LlamaForCausalLM"]
        with pytest.raises(EngineError, match=r"a LlamaForCausalLM; model .* is a Qwen2"):
            await make_rollout(model, addresses=(stand.url,)).__aenter__()


async def test_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere.*no sound config\.json"):
        await make_rollout(tmp_path / "nowhere", addresses=("http://a:1",)).__aenter__()


async def test_tokenizer_of_another_model_is_refused_at_open(model):
    context = PartContext(name="rollout", tokenizer=SimpleNamespace(eos_token_ids=(3, VOCAB)))
    with pytest.raises(DataError, match=r"ends responses with token 96.*0\.\.95"):
        await make_rollout(model, addresses=("http://a:1",), context=context).__aenter__()


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        (500, '{"error": {"message": "out of memory"}}', "/generate answered 500: out of memory"),
        (200, "data: {not json\n\n", "broke off"),
        (200, 'data: {"error": "boom"}\n\n', "answered 500: boom"),
        (200, "", "ended without an end"),
    ],
)
async def test_request_that_always_fails_ends_with_the_last_reason(
    model, monkeypatch, status, text, words
):
    monkeypatch.setattr(dispatch, "_TRIES", 2)
    async with Stand() as stand, make_rollout(model, addresses=(stand.url,)) as service:
        stand.extra["/generate"] = (status, text)
        with pytest.raises(EngineError, match=f"no token in 3 attempts.*{words}"):
            await collect(service.generate(make_requests(1)))


async def test_request_that_a_server_finds_wrong_is_not_tried_again(model):
    async with Stand() as stand, make_rollout(model, addresses=(stand.url,)) as service:
        stand.extra["/generate"] = (400, '{"error": {"message": "too long"}}')
        with pytest.raises(DataError, match=r"server-0 refuses it.*too long"):
            await collect(service.generate(make_requests(1)))


async def test_watch_that_fails_is_said_and_its_requests_fail(model, caplog):
    async with Stand() as stand, make_rollout(model, addresses=(stand.url,)) as service:
        (server,) = service._servers.values()
        stand.talks.clear()
        task = asyncio.ensure_future(collect(service.generate(make_requests(1))))
        await eventually(lambda: stand.asked)

        def broken(*arguments):
            raise ZeroDivisionError("ours")

        server._answered = broken
        with pytest.raises(PeerLostError, match=r"no server left.*its watch failed.*ours"):
            await task
        stand.talks.set()
    assert "its watch failed" in caplog.text


@pytest.mark.multiproc
async def test_server_that_ends_at_once_is_started_again_only_if_its_port_was_taken(
    model, tmp_path, monkeypatch
):
    """A script in SGLang's place, which notes its port and fails."""
    script, ports = tmp_path / "python", tmp_path / "ports"
    script.write_text(f"#!/bin/sh\necho $* >> {ports}\necho no such device\nexit 3\n")
    script.chmod(0o700)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free = free_port()
        chosen = iter([taken.getsockname()[1], free])
        monkeypatch.setattr(server, "free_port", lambda: next(chosen))
        words = r"cannot be opened: .*status 3; last lines of (?s:.*)no such device"
        options = {"python": str(script), "restarts": 5, "poll_timeout_s": 0.5}
        with pytest.raises(EngineError, match=words):
            await make_rollout(model, **options).__aenter__()
    first, second = ports.read_text().splitlines()
    assert f"--port {free} " not in first
    assert f"--port {free} " in second
