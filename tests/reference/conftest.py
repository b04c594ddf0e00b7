from types import ModuleType

import numpy as np
import pytest

from asyncflow_core.batch import Batch, Column
from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.reference import plugin
from asyncflow_core.registry import Registry
from asyncflow_core.services.trainer import LossCapabilities

SAMPLING = {"max_new_tokens": 8, "temperature": 1.0}


@pytest.fixture(scope="session")
def registry() -> Registry:
    """The reference plugins and a loss on torch arrays."""

    class Torchish:
        @staticmethod
        @hookimpl
        def asyncflow_register(registrar):
            able = LossCapabilities(arrays="torch")
            registrar.add(
                "loss", "torchish", lambda options, ctx: None, api_version=1, capabilities=able
            )

    module = ModuleType("torchish")
    module.asyncflow_register = Torchish.asyncflow_register
    made = Registry([])
    made.add(plugin)
    made.add(module)
    return made


def make_batch(rows: int = 6, *, vocab: int = 7, seed: int = 0, masked: float = 0.8) -> Batch:
    """Rows of 0 to 5 response tokens (the first of 3), some of them not trained."""
    rng = np.random.default_rng(seed)
    lengths = [3, *rng.integers(0, 6, rows - 1)]

    def ragged(make, dtype):
        return Column.ragged([make(n) for n in lengths], dtype)

    return Batch(
        {
            "prompt_ids": Column.ragged(
                [rng.integers(0, vocab, rng.integers(1, 4)) for _ in lengths], np.int32
            ),
            "response_ids": ragged(lambda n: rng.integers(0, vocab, n), np.int32),
            "behaviour_logprobs": ragged(lambda n: -rng.uniform(1, 3, n), np.float32),
            "advantages": ragged(lambda n: np.full(n, rng.normal()), np.float32),
            "loss_mask": ragged(lambda n: rng.random(n) < masked, np.uint8),
            "sampling": Column.objects([SAMPLING] * rows),
        }
    )
