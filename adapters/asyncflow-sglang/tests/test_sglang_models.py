"""Servers that the rollout starts: other architectures, tied heads, two ranks, a whole run."""

import asyncio
import json
import logging
import os
import sys

import pytest
from sglang_helpers import (
    ROOT,
    assert_exact,
    make_requests,
    make_rollout,
    save_model,
    server_python,
    switch,
    versioned_model,
)

from asyncflow_core.errors import EngineError
from asyncflow_core.services.rollout import SwitchMode
from asyncflow_core.testing.aio import collect

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]


async def check_update(model, **options):
    async with make_rollout(model, **options) as service:
        for version, mode in ((0, None), (1, SwitchMode.DRAIN), (2, SwitchMode.IN_FLIGHT)):
            if mode is not None:
                await switch(service, model, version, mode)
            for completion in await collect(service.generate(make_requests(4))):
                assert completion.versions.tolist() == [[version, 8]]
                assert_exact(versioned_model(model, version), completion)


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen3", True)])
async def test_architecture_is_updated_and_proven_by_its_checksum(tmp_path, caplog, kind, tied):
    model = save_model(tmp_path / "m", kind, tied=tied)
    with caplog.at_level(logging.INFO, "asyncflow_sglang"):
        await check_update(model, verify="checksum")
    assert "serves version 2 (by disk, proven by checksum)" in caplog.text


@pytest.mark.parametrize("update", ["tensor", "distributed"])
async def test_two_ranks_are_updated_and_proven_by_logprobs(model, two_ranks, caplog, update):
    two_ranks.reset()
    with caplog.at_level(logging.INFO, "asyncflow_sglang"):
        await check_update(model, update=update, addresses=(two_ranks.url,))
    assert f"serves version 2 (by {update}, proven by logprobs)" in caplog.text


async def test_server_that_cannot_start_is_given_up_at_once_with_its_last_words(model):
    service = make_rollout(model, engine_args={"no_such_flag": 1}, restarts=3)
    with pytest.raises(EngineError, match=r"status 2; last lines of (?s:.*)--no-such-flag"):
        await service.__aenter__()


async def test_example_runs_with_weights_at_each_version(tmp_path):
    server_python()
    base = ROOT / "examples" / "spell_backward"
    asyncflow = [sys.executable, "-m", "asyncflow_core.cli"]
    steps = ["workflow.steps=4", "workflow.groups_per_step=8", "evaluation.limit=32"]
    for command in (
        [sys.executable, str(base / "prepare.py")],
        [*asyncflow, "run", str(base / "sglang.yaml"), f"out={tmp_path}", *steps],
    ):
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()[-3000:]
    run = tmp_path / "demo-sglang"
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    dropped = sum(summary["rows_dropped_by_reason"].values())
    assert summary["rows_put"] == summary["rows_trained"] + dropped
    assert summary["rows_trained"] == 4 * 8 * 8
    assert summary["max_staleness_trained"] <= 1
    log = (run / "logs" / "rollout-0.log").read_text("utf-8")
    for version in range(1, 5):
        assert f"serves version {version} (by disk, proven by checksum)" in log
