"""The conformance kits on a plugin as it is installed; `asyncflow check-plugin` runs them.

A plugin's own test gives the kits' fixtures; here they are made from what the plugin declares. What
cannot be known that way (the weights of a model, where no difference names them) skips the tests
that need it, with a reason that begins with "not checked".
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncflow_core.batch import Batch, Column
from asyncflow_core.errors import AsyncFlowError, DataError
from asyncflow_core.flow.building import build
from asyncflow_core.hookspecs import hookimpl
from asyncflow_core.parts import PartContext, Tokenizer
from asyncflow_core.reference.tokenizer import CharactersOptions, CharactersTokenizer
from asyncflow_core.registry import Plugin, Registrar, Registry
from asyncflow_core.services.data_store import DataStore
from asyncflow_core.services.rollout import Rollout, RolloutCapabilities
from asyncflow_core.services.trainer import (
    LossCapabilities,
    LossOutput,
    LossSpec,
    Trainer,
    TrainerCapabilities,
)
from asyncflow_core.services.weight_sync import (
    DTYPE_BYTES,
    Bucket,
    PublishedWeights,
    TensorSpec,
    WeightSource,
    WeightSync,
    WeightSyncCapabilities,
    check_tensors,
)
from asyncflow_core.testing._reports import VARIABLE
from asyncflow_core.testing.aio import manifest_of, stream
from asyncflow_core.testing.data_store import BYTES, ROWS, STALENESS, DataStoreTests
from asyncflow_core.testing.rollout import MakeBuckets, RolloutTests
from asyncflow_core.testing.trainer import TrainerTests
from asyncflow_core.testing.weight_sync import WeightSyncTests

NOT_CHECKED = "not checked: "
"""How the reason of a skip begins that is not about a capability."""

_COLLECTIVE = (
    f"{NOT_CHECKED}a collective is received by an engine; a test of the plugin's own overrides "
    f"WeightSyncTests.receive"
)
_FLOATS: Mapping[str, type[np.floating[Any]]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
}
_READS = ("advantages",)
_ORDINARY, _SHORT = 1e-5, 2e-2  # tolerances: of 32 bits, of 16


@dataclass(frozen=True, slots=True)
class Target:
    """The plugin to check, with its options."""

    plugin: Plugin
    options: Any
    registry: Registry
    run_dir: str

    @property
    def able(self) -> Any:
        """Its capability record."""
        return self.plugin.capabilities_for(self.options)

    @property
    def tolerance(self) -> float:
        """Of log-probs, for an engine that reduces batches of other sizes in another order."""
        return _SHORT if "16" in str(getattr(self.options, "dtype", "")) else _ORDINARY

    def make(self, name: str, run_dir: Path, **changes: Any) -> Any:
        """A new one that is not open, with some options changed."""
        options = self.options
        if changes:
            values = options.model_dump(mode="json", exclude_unset=True)
            options = self.plugin.parse_options({**values, **changes})
        tokenizer = None if getattr(options, "model", None) else endless_tokenizer()
        context = PartContext(
            name=name, run_dir=run_dir, tokenizer=tokenizer, registry=self.registry
        )
        return build(self.plugin, options, context)


def endless_tokenizer() -> Tokenizer:
    """One that ends no response: the kits need responses as long as they ask for."""
    return CharactersTokenizer(CharactersOptions(eos=False), PartContext(name="tokenizer"))


@pytest.fixture(scope="session")
def target() -> Target:
    """As `asyncflow check-plugin` was asked, beside the losses that a trainer is given."""
    asked = json.loads(os.environ[VARIABLE])
    registry = Registry()
    registry.add(_losses())
    plugin = registry.get(asked["kind"], asked["name"])
    return Target(plugin, plugin.parse_options(asked["options"]), registry, asked["run_dir"])


@pytest.fixture
def run_dir(target: Target) -> Iterator[Path]:
    """Private, and with a short name: sockets lie in it."""
    with tempfile.TemporaryDirectory(dir=target.run_dir, ignore_cleanup_errors=True) as made:
        yield Path(made)


class TestDataStore(DataStoreTests):
    """On a store of the kit's own size."""

    @pytest.fixture
    async def service(self, target: Target, run_dir: Path) -> AsyncIterator[DataStore]:
        """Opened and empty."""
        size = {"capacity_rows": ROWS, "capacity_bytes": BYTES, "max_staleness": STALENESS}
        async with target.make("data_store", run_dir, **size) as store:
            yield store


class TestRollout(RolloutTests):
    """On weights of the names, shapes and dtypes that the rollout asks for."""

    @pytest.fixture(autouse=True)
    def _tolerance(self, target: Target) -> None:
        self.logprob_tolerance = target.tolerance

    @pytest.fixture
    def unopened(self, target: Target, run_dir: Path) -> Rollout:
        """Not opened."""
        made: Rollout = target.make("rollout", run_dir)
        return made

    @pytest.fixture
    async def service(self, unopened: Rollout) -> AsyncIterator[Rollout]:
        """Opened."""
        async with unopened:
            yield unopened

    @pytest.fixture
    def capabilities(self, target: Target) -> RolloutCapabilities:
        """As registered."""
        able: RolloutCapabilities = target.able
        return able

    @pytest.fixture
    def buckets(self, tensors: list[TensorSpec]) -> MakeBuckets:
        """Random values, others for each version."""
        return lambda version: [_random_bucket(spec, version) for spec in tensors]

    @pytest.fixture(scope="session")
    def tensors(self, target: Target) -> list[TensorSpec]:
        """Of the model; none can be guessed, so the rollout or its model's files tell."""
        if "buckets" not in target.able.weight_sources:
            pytest.skip(f"{NOT_CHECKED}the rollout takes no buckets, which the kit stages")
        with ThreadPoolExecutor(1) as thread:  # which has an event loop of its own
            found = thread.submit(asyncio.run, _asked_for(target)).result()
        found = found or _of_files(target.options)
        if not found:
            pytest.skip(
                f"{NOT_CHECKED}the tensors of the model are unknown; let stage_weights compare by "
                f"asyncflow_core.services.weight_sync.check_tensors"
            )
        return sorted(found, key=lambda spec: len(spec.shape) == 1)  # the kit reshapes the first

    @pytest.fixture
    def prompt_ids(self) -> NDArray[np.int32]:
        """Of any vocabulary."""
        return np.array([1, 0, 1], np.int32)


class TestTrainer(TrainerTests):
    """On one rank."""

    @pytest.fixture(autouse=True)
    def _tolerance(self, target: Target) -> None:
        self.tolerance = target.tolerance

    @pytest.fixture
    def unopened(self, target: Target, run_dir: Path) -> Trainer:
        """Not opened."""
        made: Trainer = target.make("trainer-0", run_dir)
        return made

    @pytest.fixture
    async def service(self, unopened: Trainer) -> AsyncIterator[Trainer]:
        """Opened."""
        async with unopened:
            yield unopened

    @pytest.fixture
    def capabilities(self, target: Target) -> TrainerCapabilities:
        """As registered."""
        able: TrainerCapabilities = target.able
        return able

    @pytest.fixture
    def batch(self) -> Batch:
        """Six rows of 1 to 6 tokens, of any vocabulary."""
        rng = np.random.default_rng(0)
        lengths = range(1, 7)

        def ragged(make: Any, dtype: Any) -> Column:
            return Column.ragged([make(length) for length in lengths], dtype)

        return Batch(
            {
                "prompt_ids": ragged(lambda n: rng.integers(0, 2, 7 - n), np.int32),
                "response_ids": ragged(lambda n: rng.integers(0, 2, n), np.int32),
                "loss_mask": ragged(lambda n: np.arange(n) != 1, np.uint8),
                "behaviour_logprobs": ragged(lambda n: -rng.random(n), np.float32),
                "advantages": ragged(rng.standard_normal, np.float32),
                "sampling": Column.objects([{"max_new_tokens": 6, "temperature": 1.0}] * 6),
            }
        )

    @pytest.fixture
    def loss(self, capabilities: TrainerCapabilities) -> LossSpec:
        """For the trainer's arrays."""
        return LossSpec(f"check_{capabilities.loss_arrays}")

    @pytest.fixture
    def misfit_loss(self, capabilities: TrainerCapabilities) -> LossSpec:
        """For the others."""
        return LossSpec("check_numpy" if capabilities.loss_arrays == "torch" else "check_torch")

    async def test_forward_temperature_is_the_rows(self, service: Trainer, batch: Batch) -> None:
        """TR-3; a policy that is uniform is so at every temperature."""
        if np.ptp(await self.logprobs(service, batch)) <= self.tolerance:
            pytest.skip(
                f"{NOT_CHECKED}the first policy is uniform, so no temperature changes it; give "
                f"options by which it is not"
            )
        await super().test_forward_temperature_is_the_rows(service, batch)


class TestWeightSync(WeightSyncTests):
    """Two sides in this process."""

    @pytest.fixture(autouse=True)
    def _given(self, capabilities: WeightSyncCapabilities) -> None:
        self._source = capabilities.source

    @pytest.fixture
    def unopened(self, target: Target, run_dir: Path) -> WeightSync:
        """Not opened."""
        made: WeightSync = target.make("trainer-0", run_dir)
        return made

    @pytest.fixture
    async def service(self, unopened: WeightSync) -> AsyncIterator[WeightSync]:
        """The trainer's side."""
        async with unopened:
            yield unopened

    @pytest.fixture
    async def replica(self, target: Target, run_dir: Path) -> AsyncIterator[WeightSync]:
        """The replica's side."""
        async with target.make("rollout-0", run_dir) as made:
            yield made

    @pytest.fixture
    def capabilities(self, target: Target) -> WeightSyncCapabilities:
        """As registered."""
        able: WeightSyncCapabilities = target.able
        return able

    async def checksum(self, replica: WeightSync, published: PublishedWeights) -> str:
        """Not even begun where it could not end: a group waits for its members."""
        if self._source == "collective":
            pytest.skip(_COLLECTIVE)
        return await super().checksum(replica, published)

    async def receive(self, source: WeightSource) -> AsyncIterator[Bucket]:
        """What comes; a group can only be joined by its library."""
        if source.collective is not None:
            pytest.skip(_COLLECTIVE)
        async for bucket in super().receive(source):
            yield bucket


def _loss(logprobs: Any, columns: Mapping[str, Any], config: Any) -> LossOutput:
    """The policy gradient, in operations that numpy and torch share."""
    share = columns["loss_mask"] * columns["advantages"]
    total = -(logprobs * share).sum()
    return LossOutput(total, float(columns["loss_mask"].sum()), grad=-share)


@hookimpl
def asyncflow_register(registrar: Registrar) -> None:
    """Offer one loss for the arrays of each library."""
    for able in (LossCapabilities("numpy", _READS), LossCapabilities("torch", _READS)):
        name = f"check_{able.arrays}"
        registrar.add("loss", name, lambda options, ctx: _loss, api_version=1, capabilities=able)


def _losses() -> ModuleType:
    """A plugin module of these alone: this one's fixtures are none of pluggy's business."""
    module = ModuleType("asyncflow_check_losses")
    vars(module)["asyncflow_register"] = asyncflow_register
    return module


async def _asked_for(target: Target) -> list[TensorSpec]:
    """The tensors a rollout expects, by what it says to a version that has none."""
    run_dir = Path(target.run_dir)
    try:
        async with target.make("rollout", run_dir) as service:
            await service.stage_weights(WeightSource(manifest_of([], 1), buckets=stream([])))
    except DataError as error:
        return _expected(error)
    except AsyncFlowError:
        return []  # the tests say why
    return []


def _expected(error: BaseException | None) -> list[TensorSpec]:
    """What `check_tensors` was comparing with when it raised; its message names one alone."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code is check_tensors.__code__:
                return [replace(spec, offset=0) for spec in frame.f_locals["ours"].values()]
        error = error.__cause__ or error.__context__
    return []


def _of_files(options: Any) -> list[TensorSpec]:
    """The tensors of the model directory that the options name, in the dtype they name."""
    model = getattr(options, "model", None)
    dtype = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}.get(
        str(getattr(options, "dtype", ""))
    )
    found = []
    for file in sorted(Path(model).glob("*.safetensors")) if model else ():
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            kept = dtype if dtype and entry["dtype"] in ("F32", "BF16", "F16") else entry["dtype"]
            found.append(TensorSpec(name, kept, tuple(entry["shape"])))
    return found


def _random_bucket(spec: TensorSpec, version: int) -> Bucket:
    """Small numbers, which no engine overflows on; integers and short floats of a byte are 0."""
    rng = np.random.default_rng([version, *spec.name.encode()])
    values = 0.2 * rng.standard_normal(spec.nbytes // DTYPE_BYTES[spec.dtype])
    if spec.dtype == "BF16":
        data = (values.astype("<f4").view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    elif spec.dtype in _FLOATS:
        data = values.astype(_FLOATS[spec.dtype]).view(np.uint8)
    else:
        data = np.zeros(spec.nbytes, np.uint8)
    return Bucket((spec,), data)
