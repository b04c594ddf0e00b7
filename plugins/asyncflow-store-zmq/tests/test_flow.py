"""A run whose rows live in the store: in one process, and with workers that reach it themselves."""

from __future__ import annotations

import json
import string

import numpy as np
import pytest

import asyncflow_core as af


def right_letter(response: str) -> float:
    return float(response == "b")


def centred(batch):
    """Rewards less their mean, for each token."""
    rewards = batch["reward"].array - batch["reward"].array.mean()
    return {
        "advantages": [
            np.full(len(ids), reward, np.float32)
            for ids, reward in zip(batch["response_ids"], rewards, strict=True)
        ]
    }


def run(tmp_path, **how):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": c}) + "\n" for c in "abcdefgh"))
    flow = af.Flow(
        name="small",
        out=str(tmp_path / "runs"),
        tokenizer=af.use("characters", alphabet=string.ascii_lowercase),
        prompts=af.use("jsonl", path=str(prompts)),
        rollout=af.use("tabular", sampling={"max_new_tokens": 1}),
        trainer=af.use("tabular", lr=20.0),
        loss=af.use("tabular_ppo_clip"),
        stages={
            "reward": af.reward(right_letter),
            "advantage": af.stage(
                centred, reads=["reward", "response_ids"], writes=["advantages"], whole_groups=True
            ),
        },
        workflow={"max_staleness": 1, "steps": 3, "groups_per_step": 4, "group_size": 4},
        data_store=af.use("zmq", shards=1),
        **how,
    )
    return [step.version for step in flow.run()], flow.summary


@pytest.mark.multiproc
def test_flow_in_one_process_trains_every_row_once(tmp_path):
    versions, summary = run(tmp_path, weight_sync=af.use("memory"), launcher=af.use("inline"))
    assert versions == [1, 2, 3]
    assert summary.rows_trained == 3 * 4 * 4


@pytest.mark.slow
@pytest.mark.multiproc
def test_flow_with_processes_reaches_the_store_by_its_own_address(tmp_path):
    pytest.importorskip("asyncflow_weights_host")
    versions, summary = run(tmp_path, weight_sync=af.use("host"), launcher=af.use("local"))
    assert versions == [1, 2, 3]
    assert summary.rows_trained == 3 * 4 * 4
