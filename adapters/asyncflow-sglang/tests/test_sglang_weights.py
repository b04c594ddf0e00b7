"""Staged weights, the server's checksum, options and command lines: what needs no server."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
from sglang_helpers import PROMPT, make_buckets, plain_logprobs, save_model, tiny_qwen2

from asyncflow_core.errors import DataError
from asyncflow_core.parts import PartContext
from asyncflow_core.registry import PluginEntry, Registry
from asyncflow_core.services.rollout import SwitchMode
from asyncflow_core.services.weight_sync import Bucket, WeightSource
from asyncflow_core.testing.aio import eventually, manifest_of
from asyncflow_core.testing.generation import make_source
from asyncflow_sglang import keeper, layout, probe
from asyncflow_sglang.directory import OwnDirectory
from asyncflow_sglang.files import Writer, batches, expected_tensors, link_files
from asyncflow_sglang.launch import arguments, environment
from asyncflow_sglang.options import SGLangOptions, check
from asyncflow_sglang.plugin import capabilities


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "tiny", tied=request.param)


def held(root, model, version=1, *, tied=False):
    buckets = make_buckets(tiny_qwen2(version, tied=tied))
    writer = Writer(root, manifest_of(buckets, version), expected_tensors(str(model)))
    for bucket in buckets:
        writer.add(bucket)
    return writer.finish(), buckets


def is_tied(model):
    return json.loads((model / "config.json").read_text())["tie_word_embeddings"]


def test_buckets_lie_in_files_as_published(tmp_path, model):
    found, buckets = held(tmp_path, model, tied=is_tied(model))
    assert found.checksum == manifest_of(buckets, 1).checksum
    for bucket in buckets:
        for spec in bucket.specs:
            assert found.read(spec.name).tobytes() == bucket.tensor_bytes(spec).tobytes()
    from safetensors import safe_open

    names = set()
    for file in set(found.file_of.values()):
        with safe_open(file, framework="np") as content:
            names |= set(content.keys())
    assert names == found.tensors.keys()
    found.remove()
    assert not list(tmp_path.iterdir())


def test_tied_tensor_gets_the_name_the_servers_load(tmp_path):
    model = save_model(tmp_path / "m", tied=True)
    buckets = []
    for bucket in make_buckets(tiny_qwen2(1, tied=True)):
        specs = [
            replace(s, name="lm_head.weight", aliases=(s.name,)) if s.aliases else s
            for s in bucket.specs
        ]
        buckets.append(Bucket(tuple(specs), bucket.data))
    manifest = manifest_of(buckets, 1)
    (tmp_path / "root").mkdir()
    writer = Writer(tmp_path / "root", manifest, expected_tensors(str(model)))
    for bucket in buckets:
        writer.add(bucket)
    found = writer.finish()
    assert "model.embed_tokens.weight" in found.tensors
    assert "lm_head.weight" not in found.tensors
    assert found.checksum == manifest.checksum


def test_path_source_is_held_by_links_that_outlive_it(tmp_path, model):
    found, buckets = held(tmp_path, model, tied=is_tied(model))
    manifest = manifest_of(buckets, 1)
    linked = link_files(tmp_path, str(found.path), manifest, expected_tensors(str(model)))
    assert linked.checksum == manifest.checksum
    found.remove()
    for bucket in buckets:
        for spec in bucket.specs:
            assert linked.read(spec.name).tobytes() == bucket.tensor_bytes(spec).tobytes()
    with pytest.raises(DataError, match="retired"):
        link_files(tmp_path, str(found.path), manifest, expected_tensors(str(model)))


def test_path_source_that_is_not_what_was_announced_leaves_nothing(tmp_path, model):
    found, buckets = held(tmp_path, model, tied=is_tied(model))
    manifest = manifest_of(buckets, 1)
    fewer = replace(manifest, tensors=manifest.tensors[1:])
    with pytest.raises(DataError, match=r"embed_tokens\.weight"):
        link_files(tmp_path, str(found.path), fewer, expected_tensors(str(model)))
    assert list(tmp_path.iterdir()) == [found.path]


def test_buckets_that_end_early_or_come_twice_are_refused(tmp_path, model):
    buckets = make_buckets(tiny_qwen2(1, tied=is_tied(model)))
    writer = Writer(tmp_path, manifest_of(buckets, 1), expected_tensors(str(model)))
    writer.add(buckets[0])
    with pytest.raises(DataError, match="announced None"):
        writer.add(buckets[0])
    with pytest.raises(DataError, match="ended without"):
        writer.finish()
    writer.abort()
    assert not list(tmp_path.iterdir())


def test_batches_hold_every_tensor_once_and_keep_the_limit(tmp_path, model):
    found, _ = held(tmp_path, model, tied=is_tied(model))
    for limit in (1, 20_000, 1 << 30):
        parts = list(batches(found, limit))
        assert [s.name for part in parts for s in part] == list(found.tensors)
        assert all(len(p) == 1 or sum(s.nbytes for s in p) <= limit for p in parts)


def test_servers_checksum_is_that_of_the_fused_tensors(tmp_path, model):
    """Golden: torch concatenates, hashlib hashes."""
    import torch

    found, _ = held(tmp_path, model, tied=is_tied(model))
    state = dict(tiny_qwen2(1, tied=is_tied(model)).named_parameters())

    def digest(*tensors):
        joined = torch.cat([t.detach() for t in tensors]).contiguous()
        return hashlib.sha256(joined.numpy().tobytes()).digest()[:8].hex()

    sums = layout.expected(found)
    at = "model.layers.1."
    qkv = [state[f"{at}self_attn.{p}_proj.bias"] for p in "qkv"]
    assert sums[f"{at}self_attn.qkv_proj.bias"] == digest(*qkv)
    halves = [state[f"{at}mlp.{p}_proj.weight"] for p in ("gate", "up")]
    assert sums[f"{at}mlp.gate_up_proj.weight"] == digest(*halves)
    assert sums["model.norm.weight"] == digest(state["model.norm.weight"])
    embedding = state["model.embed_tokens.weight"]  # 96 rows stand in 128
    assert sums["model.embed_tokens.weight"] == digest(embedding, torch.zeros(32, 32))
    answer = {"ranks": [{"checksums": dict(sums)}]}
    assert layout.difference(sums, answer) == ""
    answer["ranks"][0]["checksums"]["model.norm.weight"] = "0" * 16
    assert "model.norm.weight" in layout.difference(sums, answer)
    del answer["ranks"][0]["checksums"]["model.norm.weight"]
    assert "checksum None" in layout.difference(sums, answer)


CPU = {"device": "cpu", "dtype": "float32", "tp_size": 1, "pp_size": 1, "quantization": None}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"dtype": "auto"}, ""),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"device": "cuda"}, "device cuda"),
        ({"tp_size": 2}, "2 ranks"),
        ({"quantization": "fp8"}, "fp8"),
    ],
)
def test_layout_is_known_only_where_it_is(tmp_path, model, change, reason):
    found, _ = held(tmp_path, model, tied=is_tied(model))
    told = layout.known_reason(str(model), {**CPU, **change}, found)
    assert (reason in told) if reason else told == ""


def test_reference_logprobs_are_those_of_a_plain_forward(tmp_path, model):
    found, _ = held(tmp_path, model, tied=is_tied(model))
    prompt = [*PROMPT, 5, 6]
    ours = probe.reference(found, str(model), prompt)
    plain = tiny_qwen2(1, tied=is_tied(model)).eval()
    np.testing.assert_allclose(ours, plain_logprobs(plain, prompt[:1], prompt[1:]), atol=1e-5)


def test_update_by_shared_memory_is_a_pickle_of_names_and_places(tmp_path, model):
    """Written here, read by SGLang: what it says is looked at without unpickling it."""
    import base64
    import pickletools

    from asyncflow_sglang.tensors import shared

    found, _ = held(tmp_path, model, tied=is_tied(model))
    part = next(batches(found, 1 << 30))
    with shared(found, part) as text:
        opcodes = list(pickletools.genops(base64.b64decode(text)))
    texts = {argument for _, argument, _ in opcodes if isinstance(argument, str)}
    assert {spec.name for spec in part} <= texts
    assert "rebuild_storage_filename" in " ".join(texts)


def test_directory_of_a_killed_owner_is_swept_and_a_living_ones_is_not(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; "
        "from asyncflow_sglang.directory import OwnDirectory; "
        f"(OwnDirectory(Path({str(tmp_path)!r})).path / 'weights').touch(); os._exit(1)"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=False, env=environment)
    (left,) = tmp_path.iterdir()
    first = OwnDirectory(tmp_path)
    assert not left.exists()
    second = OwnDirectory(tmp_path)
    assert first.path.stat().st_mode & 0o777 == 0o700
    second.remove()
    assert list(tmp_path.iterdir()) == [first.path]
    first.remove()
    assert not list(tmp_path.iterdir())


# Options, command lines, capabilities.


def test_check_names_what_is_wrong(tmp_path, model, monkeypatch):
    def faults(**options):
        return " ".join(check(SGLangOptions(**{"model": str(model), **options})))

    addresses = ("http://a:1",)
    assert faults(addresses=addresses) == ""
    assert "no directory" in faults(model=str(tmp_path / "nowhere"), addresses=addresses)
    assert "config.json" in faults(model=str(tmp_path), addresses=addresses)
    assert "no URL" in faults(addresses=("a:1",))
    assert "'http://a:1' twice" in faults(addresses=("http://a:1", "http://a:1/"))
    ignored = faults(addresses=addresses, servers=2, engine_args={"tp_size": 2})
    assert "servers, engine_args.tp_size concern servers that are started" in ignored
    assert faults(addresses=addresses, engine_args={"skip_tokenizer_init": True}) == ""
    taken = faults(python=sys.executable, engine_args={"port": 1, "host": "0.0.0.0"})
    assert "engine_args sets host, port" in taken
    assert "router needs addresses" in faults(router="http://r:1", python=sys.executable)
    assert "no program" in faults(python=str(tmp_path / "python"))
    assert "set python" in faults()
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    assert "NO_SUCH_KEY" in faults(addresses=addresses, api_key_env="NO_SUCH_KEY")


def test_engine_args_reach_the_server_untouched_and_win():
    options = SGLangOptions(
        model="m",
        python="/env/python",
        device="cpu",
        engine_args={
            "tp_size": 2,
            "disable_radix_cache": True,
            "sleep_on_idle": False,
            "attention_backend": "triton",
            "lora_paths": ["a", "b"],
        },
        env={"SGLANG_LOG_MS": "1"},
    )
    line = " ".join(arguments(options, 1234))
    assert line.startswith("/env/python -m sglang.launch_server --model-path m ")
    assert "--port 1234" in line
    assert "--tp-size 2 --disable-radix-cache" in line
    assert "--lora-paths a b" in line
    assert "--attention-backend triton" in line
    assert "torch_native" not in line
    assert "--sleep-on-idle" not in line
    found = environment(options)
    assert found["SGLANG_LOG_MS"] == "1"
    assert found["SGLANG_USE_CPU_ENGINE"] == "1"


def test_servers_environment_lacks_what_would_change_it(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    found = environment(SGLangOptions(model="m"))
    assert not {"PYTHONPATH", "SGLANG_RETURN_ORIGINAL_LOGPROB"} & found.keys()


def test_capabilities_follow_the_options():
    plain = capabilities(SGLangOptions(model="m"))
    assert plain.switch_modes == frozenset(SwitchMode)
    assert "stop" in plain.sampling
    assert not plain.seeds
    assert not plain.readback
    chosen = {"enable_deterministic_inference": True, "skip_tokenizer_init": True}
    other = capabilities(SGLangOptions(model="m", engine_args=chosen))
    assert other.seeds
    assert "stop" not in other.sampling


def test_capabilities_tell_the_context_length_where_it_is_known(tmp_path):
    def known(config, **options):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return capabilities(SGLangOptions(model=str(tmp_path), **options)).max_tokens

    plain = {"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default"}}
    assert known(plain) == 512
    assert known({"text_config": plain}) == 512
    assert known({**plain, "max_sequence_length": 300}) == 300
    assert known(plain, engine_args={"context_length": 256}) == 256
    assert known(plain, addresses=("http://a:1",)) is None
    for scaled in ({"type": "yarn", "factor": 4.0}, {"rope_type": "llama3", "factor": 8.0}):
        assert known({**plain, "rope_scaling": scaled}) is None
    assert known({}) is None
    assert known([]) is None
    assert capabilities(SGLangOptions(model=str(tmp_path / "none"))).max_tokens is None


def test_plugin_registers_without_engine_torch_or_http(model):
    entry = PluginEntry("rollout", "sglang", "asyncflow_sglang.plugin", "asyncflow-sglang", "0.1.0")
    found = Registry([entry]).get("rollout", "sglang")
    options = found.parse_options({"model": str(model), "addresses": ["http://a:1"]})
    assert type(found.factory(options, PartContext())).__name__ == "SGLangRollout"
    code = (
        "import sys, asyncflow_sglang.plugin; "
        "assert not {'torch', 'sglang', 'aiohttp'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.multiproc
@pytest.mark.parametrize("victim", ["lifeline", "keeper"])
async def test_keeper_leaves_nothing_of_a_server_behind(tmp_path, victim):
    """The server is a shell with a child of its own."""
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $! $$ > {pids}.new; mv {pids}.new {pids}; wait"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", keeper.__file__, "sh", "-c", script),
        stdin=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    await eventually(pids.exists, timeout_s=60)
    child, server = map(int, pids.read_text().split())
    if victim == "lifeline":
        process.stdin.close()
    else:
        process.kill()
    await process.wait()
    await eventually(lambda: not running(server), timeout_s=60)
    if victim == "keeper":  # SGLang's processes end with their parent; a shell's do not
        os.kill(child, signal.SIGKILL)
    await eventually(lambda: not running(child), timeout_s=60)
    process.stdin.close()


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_source_without_a_kind_is_refused(model):
    source = make_source(make_buckets(tiny_qwen2(1, tied=is_tied(model))), 1)
    with pytest.raises(DataError):
        _ = replace(source, path="x").kind


async def test_broadcast_source_gives_the_buckets_of_rank_0(model):
    """As the weight transport `collective` describes it."""
    import torch
    import torch.distributed as dist

    from asyncflow_sglang.sources import buckets_of

    buckets = make_buckets(tiny_qwen2(1, tied=is_tied(model)))
    manifest = manifest_of(buckets, 1)
    numbers = {spec.name: number for number, spec in enumerate(manifest.tensors)}
    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    how = {
        "backend": "gloo",
        "host": "127.0.0.1",
        "port": store.port,
        "group": "g",
        "rank": 1,
        "world_size": 2,
        "timeout_s": 60.0,
        "buckets": [[len(b.data), [[numbers[s.name], s.offset] for s in b.specs]] for b in buckets],
    }

    def send():
        options = dist.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = dist.ProcessGroupGloo(dist.PrefixStore("g", store), 0, 2, options)
        root = dist.BroadcastOptions()
        root.rootRank, root.rootTensor = 0, 0
        for bucket in buckets:
            group.broadcast([torch.from_numpy(bucket.data)], root).wait()

    sending = asyncio.ensure_future(asyncio.to_thread(send))
    received = [
        (bucket.specs, bucket.data.tobytes())
        async for bucket in buckets_of(WeightSource(manifest, collective=how))
    ]
    await sending
    assert received == [(bucket.specs, bucket.data.tobytes()) for bucket in buckets]
    with pytest.raises(DataError, match="join a broadcast"):
        await anext(buckets_of(WeightSource(manifest, collective={"backend": "gloo"})))
