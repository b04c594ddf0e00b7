"""What a user may set, checked without importing an engine."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from asyncflow_core.config import InputPath

__all__ = ["SGLangOptions", "check", "most_tokens"]


class SGLangOptions(BaseModel):
    """Options of the `sglang` rollout."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: InputPath
    """Directory of a Hugging Face causal language model: what started servers load, and, on this
    machine too, what attached ones serve (its sizes and tensor names are checked against)."""

    addresses: tuple[str, ...] = ()
    """Running servers to attach to, such as http://10.0.0.5:30000; none: they are started here."""
    servers: int = Field(default=1, ge=1)
    """How many servers to start where `addresses` is empty."""
    router: str | None = None
    """Address of an sglang-router in front of `addresses`: requests go through it, everything else
    to each server."""
    api_key_env: str = ""
    """Environment variable with the servers' API key; empty: they ask for none."""

    python: InputPath = ""
    """Interpreter of the environment in which SGLang is installed, since its pins clash with those
    of most trainers; empty: this one."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu adds the arguments and variables with which SGLang runs without a GPU."""
    engine_args: Mapping[str, Any] = Field(default_factory=dict)
    """Passed untouched to the servers that are started, as flags of `sglang.launch_server`:
    {tp_size: 2, disable_radix_cache: true} is --tp-size 2 --disable-radix-cache. With `addresses`
    only enable_deterministic_inference and skip_tokenizer_init, which say what these can do."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Further environment variables of started servers."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time a started server may take to answer, or one of `addresses`, or `router`."""
    restarts: int = Field(default=3, ge=0)
    """How often each started server is started again after it died, hung, or could not be given
    weights. One that ends before it ever answered is not: its log says why."""
    log_dir: Path | None = None
    """Where started servers' logs are kept; not set: with the rollout's own files, gone with it."""

    slots: int = Field(default=256, ge=1)
    """Requests sent to one server at a time; more wait here and go where there is room first."""
    affinity_slack: int = Field(default=16, ge=0)
    """A prompt's requests go to the server that has its prefix cached, unless that one has so many
    requests more than the least loaded."""
    stream_interval: int = Field(default=8, ge=1)
    """Tokens between two reports of a running request; those not yet reported are lost when its
    server dies."""

    update: Literal["disk", "tensor", "distributed"] = "disk"
    """How weights get into a server. disk: it reads safetensors files from `directory`. tensor:
    through shared memory of this machine (SGLang's own pickle). distributed: a torch.distributed
    broadcast from this process."""
    directory: Path | None = None
    """Where staged weights lie, as files; servers on other machines must see it under the same
    path for `update: disk`. Not set: in the run's own directory, which is in memory."""
    in_flight: Literal["in_place", "retract"] = "in_place"
    """What the mode in_flight does with running sequences. in_place: they go on over the keys and
    values of the old weights. retract: these are computed anew, so that later log-probs are exactly
    those of the new weights."""
    verify: Literal["auto", "checksum", "logprobs", "off"] = "auto"
    """What proves that a server holds what was published. checksum: its own checksum over its
    layout, recomputed here (Qwen2, Qwen3 and Llama on one CPU rank). logprobs: those of a fixed
    prompt, against a transformers forward here; finds gross faults only. auto: checksum where it
    is known, else logprobs."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Of `update: distributed`; nccl needs a GPU of its own for this process."""
    host: str = "127.0.0.1"
    """Address of this machine, as servers see it, for `update: distributed`."""
    bucket_bytes: int = Field(default=512 << 20, ge=1)
    """Most bytes of one call of `update: tensor` or `distributed`."""
    update_timeout_s: float = Field(default=300.0, gt=0)
    """Deadline of one server's update; of the pause and checks around it, too."""

    poll_s: float = Field(default=1.0, gt=0)
    """Time between two looks at a server."""
    poll_timeout_s: float = Field(default=10.0, gt=0)
    """A look that takes longer has failed; after three a server counts as lost."""
    stall_s: float = Field(default=120.0, gt=0)
    """A server that has requests, is not paused and yields no token for so long is lost."""
    wait_s: float = Field(default=600.0, gt=0)
    """Longest time requests wait while no server, or not the router, can take them."""


_OURS = frozenset({"host", "model_path", "port", "weight_version"})
"""Arguments of a started server that are no user's to set."""
_OF_STARTED = frozenset({"servers", "python", "device", "env", "restarts", "log_dir"})
"""Options that mean nothing where servers run already."""
_TOLD = frozenset({"enable_deterministic_inference", "skip_tokenizer_init"})
"""Arguments that say what a running server can do."""


_LENGTHS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)
"""Where SGLang finds a model's context length in its config.json, in this order."""


_PLAIN = (None, "default")
"""Types of rotary positions that are not scaled."""


def most_tokens(options: SGLangOptions) -> int | None:
    """Most tokens of a prompt with its response; None where only the server knows.

    It does of running servers, and of models whose positions are scaled.

    Source: SGLang's get_context_length.
    """
    if options.addresses:
        return None
    if isinstance(given := options.engine_args.get("context_length"), int):
        return given
    try:
        config = json.loads((Path(options.model) / "config.json").read_text("utf-8"))
        config = {**config, **(config.get("text_config") or {})}
    except (OSError, ValueError, TypeError, AttributeError):  # said by `check`, or by the server
        return None
    for name in ("rope_scaling", "rope_parameters"):
        found = config.get(name)
        if isinstance(found, Mapping) and found.get("rope_type", found.get("type")) not in _PLAIN:
            return None
    return next((config[name] for name in _LENGTHS if isinstance(config.get(name), int)), None)


def check(options: SGLangOptions) -> Iterator[str]:
    """The faults that can be seen without starting anything."""
    path = Path(options.model)
    if not path.is_dir():
        yield f"model {options.model!r} is no directory; give the path of a Hugging Face model"
    elif not (path / "config.json").is_file():
        yield f"model {options.model!r} has no config.json; give the path of a Hugging Face model"
    elif not any(path.glob("*.safetensors")):
        yield f"model {options.model!r} has no *.safetensors; save it with save_pretrained"
    yield from _check_servers(options)
    if options.api_key_env and options.api_key_env not in os.environ:
        yield f"api_key_env names {options.api_key_env!r}, which is not set in the environment"
    for fault in _needs_torch(options):
        yield f"{fault} needs torch here; try: pip install 'asyncflow-sglang[torch]'"


def _check_servers(options: SGLangOptions) -> Iterator[str]:
    urls = [*options.addresses, *([options.router] if options.router else [])]
    for url in urls:
        if not url.startswith(("http://", "https://")):
            yield f"address {url!r} is no URL; allowed: http://HOST:PORT"
    if options.router and not options.addresses:
        yield "router needs addresses: the servers behind it, for pauses and weights"
    if options.addresses:
        yield from _check_attached(options)
        return
    if own := sorted(_OURS & options.engine_args.keys()):
        yield f"engine_args sets {', '.join(own)}, which the rollout chooses itself; leave it out"
    if options.python:
        if not os.access(options.python, os.X_OK):
            yield f"python {options.python!r} is no program; give an interpreter with SGLang in it"
    elif importlib.util.find_spec("sglang") is None:
        yield (
            "SGLang is not installed here; set python to an interpreter of an environment that "
            "has it, or addresses to running servers"
        )


def _check_attached(options: SGLangOptions) -> Iterator[str]:
    urls = [url.rstrip("/") for url in options.addresses]
    if twice := sorted({url for url in urls if urls.count(url) > 1}):
        yield f"addresses names {twice[0]!r} twice; allowed: each server once"
    unused = sorted(_OF_STARTED & options.model_fields_set)
    unused += [f"engine_args.{name}" for name in sorted(options.engine_args.keys() - _TOLD)]
    if unused:
        yield (
            f"{', '.join(unused)} concern servers that are started, and addresses names running "
            f"ones; start these so, and leave it out here"
        )


def _needs_torch(options: SGLangOptions) -> Iterator[str]:
    if importlib.util.find_spec("torch") is None:
        if options.update != "disk":
            yield f"update: {options.update}"
        if options.verify == "logprobs":
            yield "verify: logprobs"
