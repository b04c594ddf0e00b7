"""What no real server of the supported version shows: a small HTTP server stands in."""

import asyncio
import json

import pytest
from aiohttp import web
from sglang_helpers import PROMPT, make_requests, make_rollout

from asyncflow_core.errors import EngineError, ServiceTimeoutError
from asyncflow_core.testing.aio import collect, eventually
from asyncflow_sglang.http import Http, RefusedError, UnreachableError


class Stand:
    """Answers as SGLang would, with one thing changed."""

    def __init__(self, *, version="0.5.23", tempered=True, workers=1, refuses=0, broken=False):
        self.version, self.tempered, self.workers = version, tempered, workers
        self.refuses, self.broken = refuses, broken
        self.label = "default"
        self.asked = []
        app = web.Application()
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/update_weight_version", self.name)
        app.router.add_post("/continue_generation", self.fine)
        app.router.add_post("/abort_request", self.fine)
        self.runner = web.AppRunner(app)

    async def __aenter__(self):
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc):
        await self.runner.cleanup()

    async def model_info(self, request):
        return web.json_response({"weight_version": self.label})

    async def server_info(self, request):
        told = {"version": self.version, "max_req_input_len": 500}
        return web.json_response({**told, "tokenizer_worker_num": self.workers})

    async def fine(self, request):
        return web.json_response({"success": True})

    async def name(self, request):
        self.label = (await request.json())["new_version"]
        return await self.fine(request)

    async def generate(self, request):
        asked = await request.json()
        temperature = asked["sampling_params"]["temperature"]
        logprob = -1.0 / (temperature if self.tempered else 1.0)
        if not asked.get("stream"):
            meta = {"output_top_logprobs": [[[logprob, 1, None]]]}
            return web.json_response({"meta_info": meta})
        self.asked.append(asked)
        meta = {
            "completion_tokens": 1,
            "output_token_logprobs": [[-1.0, 1, None]],
            "weight_version": self.label,
            "finish_reason": {"type": "length", "length": 1},
        }
        if self.refuses:
            self.refuses -= 1
            message = {"message": "out of memory", "status_code": 503}
            meta |= {"completion_tokens": 0, "output_token_logprobs": []}
            meta["finish_reason"] = {"type": "abort", **message}
        elif self.broken:
            self.broken = False
            meta["finish_reason"] = None
        reply = web.StreamResponse()
        await reply.prepare(request)
        await reply.write(b"data: " + json.dumps({"meta_info": meta}).encode() + b"\n\n")
        if meta["finish_reason"] is None:
            request.transport.close()
            return reply
        await reply.write(b"data: [DONE]\n\n")
        return reply


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
            await stand.runner.cleanup()
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
            with pytest.raises(RefusedError) as refused:
                await http.get("/nowhere", timeout_s=5)
            assert refused.value.status == 404
            with pytest.raises(UnreachableError):
                await http.get("/model_info", timeout_s=0.0)
            assert await http.get("/model_info", timeout_s=5) == {"weight_version": "default"}
            await stand.runner.cleanup()
            with pytest.raises(UnreachableError) as gone:
                await http.get("/model_info", timeout_s=5)
            assert gone.value.refused
        finally:
            await http.aclose()
            await asyncio.sleep(0)
