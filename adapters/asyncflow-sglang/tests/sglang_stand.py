"""A small HTTP server that answers as SGLang does, with one thing changed or held up."""

import asyncio
import json

from aiohttp import web
from sglang_helpers import make_rollout as make_real_rollout


def make_rollout(model, **options):
    """Nothing proves the weights of a server that has none."""
    return make_real_rollout(model, **{"verify": "off", **options})


class Stand:
    """Answers as SGLang would; for what no real server of the supported version shows, and for
    orders of events that one would have to be lucky to meet.

    Attributes:
        label: of the weights it serves. stands: whether it is paused.
        gate: updates wait for it.
        made: label that its tokens carry, where that is another.
        talks: requests get no token while it is cleared.
        hears: aborts wait for it.
        asked: bodies of /generate. called: paths.
        extra: further answers by path: (status, text).
    """

    def __init__(self, *, version="0.5.23", tempered=True, workers=1, refuses=0, broken=False):
        self.version, self.tempered, self.workers = version, tempered, workers
        self.refuses, self.broken = refuses, broken
        self.label, self.stands = "default", False
        self.architectures = None
        self.asked, self.called, self.extra = [], [], {}
        self.made = ""
        self.gate, self.talks, self.hears = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for event in (self.gate, self.talks, self.hears):
            event.set()
        self.port = 0

    async def __aenter__(self):
        await self.up()
        return self

    async def __aexit__(self, *exc):
        await self.down()

    async def up(self):
        app = web.Application()
        app.router.add_route("*", "/{path}", self.answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def down(self):
        await self.runner.cleanup()

    async def answer(self, request):
        path = request.path
        self.called.append(path)
        if path in self.extra:
            status, text = self.extra[path]
            kind = "application/json" if text.startswith(("{", "[")) else "text/plain"
            return web.Response(status=status, text=text, content_type=kind)
        known = {
            "/model_info": self.model_info,
            "/server_info": self.server_info,
            "/generate": self.generate,
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": self.go_on,
            "/update_weight_version": self.name,
            "/update_weights_from_disk": self.load,
        }
        return await known.get(path, self.fine)(request)

    async def model_info(self, request):
        told = {"weight_version": self.label, "model_path": "somewhere"}
        return web.json_response({**told, "architectures": self.architectures})

    async def server_info(self, request):
        told = {"version": self.version, "max_req_input_len": 500}
        return web.json_response({**told, "tokenizer_worker_num": self.workers})

    async def fine(self, request):
        return web.json_response({"success": True})

    async def name(self, request):
        self.label = (await request.json())["new_version"]
        return await self.fine(request)

    async def load(self, request):
        asked = await request.json()
        await self.gate.wait()
        self.label = asked["weight_version"]
        return await self.fine(request)

    async def pause(self, request):
        self.stands = True
        return await self.fine(request)

    async def go_on(self, request):
        self.stands = False
        return await self.fine(request)

    async def abort(self, request):
        await self.hears.wait()
        return await self.fine(request)

    async def generate(self, request):
        asked = await request.json()
        temperature = asked["sampling_params"]["temperature"]
        logprob = -1.0 / (temperature if self.tempered else 1.0)
        if not asked.get("stream"):
            meta = {"output_top_logprobs": [[[logprob, 1, None]]]}
            return web.json_response({"meta_info": meta})
        self.asked.append(asked)
        await self.talks.wait()
        meta = {
            "completion_tokens": 1,
            "output_token_logprobs": [[-1.0, 1, None]],
            "weight_version": self.made or self.label,
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
