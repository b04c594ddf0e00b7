"""Conformance of a Trainer; `docs/spec/trainer.md` has the clauses.

A plugin's contract test subclasses `TrainerTests` and gives the fixtures. For several ranks the
service is an `asyncflow_core.testing.ranks.RankedTrainer`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncflow_core.batch import Batch, Column
from asyncflow_core.errors import (
    AsyncFlowError,
    ConfigError,
    DataError,
    PluginNotFoundError,
    ServiceClosedError,
)
from asyncflow_core.services.trainer import LossSpec, Trainer, TrainerCapabilities, UpdateInfo
from asyncflow_core.services.weight_sync import Bucket, ManifestBuilder
from asyncflow_core.testing.aio import requires

__all__ = ["TrainerTests"]


class TrainerTests:
    """Give `service` (opened), `unopened`, `capabilities`, `batch`, `loss` and `misfit_loss`.

    The policy of `service` must not be uniform on the batch: where all logits of a position are
    equal, as in a model whose last layer is all zeros, no temperature can be seen in log-probs. A
    model with random weights will do.
    """

    tolerance = 1e-5
    """Largest difference of log-probs between one micro-batch and several."""

    @pytest.fixture
    async def service(self) -> Trainer:
        raise NotImplementedError("give an opened Trainer whose policy is not uniform")

    @pytest.fixture
    def unopened(self) -> Trainer:
        raise NotImplementedError("give a Trainer that was not opened")

    @pytest.fixture
    def capabilities(self) -> TrainerCapabilities:
        raise NotImplementedError("give the record the plugin registers")

    @pytest.fixture
    def batch(self) -> Batch:
        """At least 4 rows of different lengths, with what the loss reads and `sampling`."""
        raise NotImplementedError("give a batch drawn at temperature 1 without truncation")

    @pytest.fixture
    def loss(self) -> LossSpec:
        raise NotImplementedError("give a loss whose gradient on the batch is not zero")

    @pytest.fixture
    def misfit_loss(self) -> LossSpec:
        raise NotImplementedError("give a registered loss for arrays of the other library")

    # Helpers.

    async def logprobs(self, service: Trainer, batch: Batch) -> NDArray[Any]:
        return (await service.forward(batch))["logprobs"].array

    async def update(self, service: Trainer, parts: Sequence[Batch], loss: LossSpec) -> UpdateInfo:
        for number, part in enumerate(parts, 1):
            await service.forward_backward(part, loss, last=number == len(parts))
        return await service.optim_step()

    async def weights(self, service: Trainer) -> ManifestBuilder:
        builder = ManifestBuilder(0, 0)
        async for bucket in service.export_weights(0):
            builder.add(Bucket(bucket.specs, bucket.data.copy()))
        return builder

    async def checksum(self, service: Trainer) -> str:
        return (await self.weights(service)).build().checksum

    def assert_temperature_seen(self, plain: NDArray[Any], hot: NDArray[Any]) -> None:
        """Log-probs at temperature 1 and 2 differ; where they cannot, the fixture is to blame."""
        if np.abs(hot - plain).max() > self.tolerance:
            return
        if np.ptp(plain) <= self.tolerance:
            pytest.fail(
                f"every log-prob of the batch is {plain[0]:.4g}, at temperature 1 and 2: the "
                f"policy of `service` is uniform, and no temperature shows in it; give one whose "
                f"logits differ, as a model with random weights"
            )
        pytest.fail("log-probs at temperature 2 are those at 1: the row's temperature is ignored")

    def with_sampling(self, batch: Batch, **changes: object) -> Batch:
        entries = [{**entry, **changes} for entry in batch["sampling"]]
        return batch.with_columns({"sampling": Column.objects(entries)})

    # Life cycle.

    async def test_use_before_open_and_after_aclose_refused(
        self, unopened: Trainer, batch: Batch
    ) -> None:
        """TR-1."""
        for _ in range(2):
            with pytest.raises(ServiceClosedError):
                await unopened.stats()
            with pytest.raises(ServiceClosedError):
                await unopened.forward(batch)
            await unopened.aclose()

    # Log-probs.

    async def test_forward_one_logprob_a_response_token(
        self, service: Trainer, batch: Batch
    ) -> None:
        """TR-2."""
        column = (await service.forward(batch))["logprobs"]
        assert column.lengths.tolist() == batch["response_ids"].lengths.tolist()
        assert column.array.dtype == np.float32
        assert (column.array <= 0).all()
        for empty in (batch.take([]), Batch({}, rows=0)):
            assert (await service.forward(empty))["logprobs"].lengths.tolist() == []

    async def test_forward_row_alone_equals_in_batch(self, service: Trainer, batch: Batch) -> None:
        """TR-2."""
        together = (await service.forward(batch))["logprobs"]
        for row in range(batch.rows):
            alone = await self.logprobs(service, batch.take([row]))
            np.testing.assert_allclose(alone, together[row], atol=self.tolerance)

    async def test_forward_temperature_is_the_rows(self, service: Trainer, batch: Batch) -> None:
        """TR-3."""
        plain = await self.logprobs(service, batch)
        hot = await self.logprobs(service, self.with_sampling(batch, temperature=2.0))
        self.assert_temperature_seen(plain, hot)
        greedy = await self.logprobs(service, self.with_sampling(batch, temperature=0.0))
        np.testing.assert_allclose(greedy, plain, atol=self.tolerance)
        rows = np.arange(batch.rows)
        entries = [
            {**entry, "temperature": 1.0 if row % 2 else 2.0}
            for row, entry in zip(rows, batch["sampling"], strict=True)
        ]
        mixed = batch.with_columns({"sampling": Column.objects(entries)})
        of_row = np.repeat(rows, batch["response_ids"].lengths)
        expected = np.where(of_row % 2, plain, hot)
        np.testing.assert_allclose(
            await self.logprobs(service, mixed), expected, atol=self.tolerance
        )

    async def test_forward_truncated_rows_refused(
        self, service: Trainer, batch: Batch, loss: LossSpec, capabilities: TrainerCapabilities
    ) -> None:
        """TR-4."""
        truncated = self.with_sampling(batch, top_k=2)
        if capabilities.truncated_sampling:
            await service.forward(truncated)
            return
        with pytest.raises(DataError):
            await service.forward(truncated)
        with pytest.raises(DataError):
            await service.forward_backward(truncated, loss, last=True)
        assert not (await service.optim_step()).applied

    # Updates.

    async def test_update_k_micro_batches_equals_one(
        self, service: Trainer, batch: Batch, loss: LossSpec, tmp_path: Path
    ) -> None:
        """TR-5, TR-6: in uneven parts, with an empty one between."""
        await service.save(str(tmp_path / "start"))
        one = await self.update(service, [batch], loss)
        expected = await self.logprobs(service, batch)
        await service.load(str(tmp_path / "start"))
        rows = np.arange(batch.rows)
        parts = [batch.take(rows[:1]), batch.take(rows[:0]), batch.take(rows[1:])]
        several = await self.update(service, parts, loss)
        np.testing.assert_allclose(
            await self.logprobs(service, batch), expected, atol=self.tolerance
        )
        assert several.weight == pytest.approx(one.weight)
        assert several.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)

    async def test_update_changes_weights_and_counts(
        self, service: Trainer, batch: Batch, loss: LossSpec
    ) -> None:
        """TR-7, TR-14."""
        before, checksum = await self.logprobs(service, batch), await self.checksum(service)
        first = await self.update(service, [batch], loss)
        assert first.applied
        assert first.weight > 0
        assert first.grad_norm > 0
        changed = await self.checksum(service)
        assert changed != checksum
        assert not (await service.optim_step()).applied  # no gradient is left
        assert await self.checksum(service) == changed
        assert np.abs(await self.logprobs(service, batch) - before).max() > 0
        second = await self.update(service, [batch], loss)
        assert second.updates == first.updates + 1 == (await service.stats()).updates

    async def test_forward_backward_info_counts_rows_and_tokens(
        self, service: Trainer, batch: Batch, loss: LossSpec
    ) -> None:
        """TR-14."""
        info = await service.forward_backward(batch, loss, last=True)
        tokens = len(batch["prompt_ids"].array) + len(batch["response_ids"].array)
        assert (info.rows, info.tokens) == (batch.rows, tokens)
        for nothing in (batch.take([]), Batch({}, rows=0)):
            empty = await service.forward_backward(nothing, loss, last=True)
            assert (empty.rows, empty.tokens, empty.weight, empty.loss_sum) == (0, 0, 0, 0)
        assert (await service.stats()).tokens == tokens

    async def test_optim_step_nothing_collected_not_applied(
        self, service: Trainer, batch: Batch, loss: LossSpec
    ) -> None:
        """TR-6, TR-8."""
        before = await self.checksum(service)
        assert not (await self.update(service, [], loss)).applied
        assert not (await self.update(service, [batch.take([])], loss)).applied
        assert await self.checksum(service) == before

    async def test_zero_grad_collected_is_gone(
        self, service: Trainer, batch: Batch, loss: LossSpec
    ) -> None:
        """TR-9."""
        await service.forward_backward(batch, loss, last=True)
        await service.zero_grad()
        assert not (await service.optim_step()).applied

    async def test_loss_unknown_or_misfit_refused(
        self, service: Trainer, batch: Batch, loss: LossSpec, misfit_loss: LossSpec
    ) -> None:
        """TR-10."""
        with pytest.raises(PluginNotFoundError):
            await service.forward_backward(batch, LossSpec("no_such_loss"), last=True)
        with pytest.raises(ConfigError):
            await service.forward_backward(batch, misfit_loss, last=True)
        with pytest.raises(ConfigError):
            bad = replace(loss, options={**loss.options, "no_such_option": 1})
            await service.forward_backward(batch, bad, last=True)

    # State.

    async def test_load_then_update_bit_equal(
        self, service: Trainer, batch: Batch, loss: LossSpec, tmp_path: Path
    ) -> None:
        """TR-11: after some updates, so that the optimizer's state counts."""
        for _ in range(2):
            await self.update(service, [batch], loss)
        await service.save(str(tmp_path / "deep" / "state"))
        saved = await self.checksum(service)
        straight = [await self.update(service, [batch], loss) for _ in range(2)]
        expected = await self.checksum(service)
        await service.load(str(tmp_path / "deep" / "state"))
        assert await self.checksum(service) == saved
        assert [await self.update(service, [batch], loss) for _ in range(2)] == straight
        assert await self.checksum(service) == expected

    async def test_save_existing_directory_refused(self, service: Trainer, tmp_path: Path) -> None:
        """TR-12."""
        (tmp_path / "state").mkdir()
        with pytest.raises(AsyncFlowError):
            await service.save(str(tmp_path / "state"))
        assert sorted(os.listdir(tmp_path)) == ["state"]
        assert os.listdir(tmp_path / "state") == []

    async def test_load_damaged_refused_and_state_kept(
        self, service: Trainer, tmp_path: Path
    ) -> None:
        """TR-12."""
        before = await self.checksum(service)
        with pytest.raises(AsyncFlowError):
            await service.load(str(tmp_path / "nothing"))
        assert await self.checksum(service) == before

    async def test_load_of_a_state_with_a_file_cut_short_refused_and_state_kept(
        self, service: Trainer, batch: Batch, loss: LossSpec, tmp_path: Path
    ) -> None:
        """TR-12: whichever file it is."""
        await service.save(str(tmp_path / "state"))
        await self.update(service, [batch], loss)
        before = await self.checksum(service)
        for file in sorted(path for path in (tmp_path / "state").rglob("*") if path.is_file()):
            whole = file.read_bytes()
            file.write_bytes(whole[: len(whole) // 2])
            with pytest.raises(AsyncFlowError):
                await service.load(str(tmp_path / "state"))
            assert await self.checksum(service) == before, file.name
            file.write_bytes(whole)
        await service.load(str(tmp_path / "state"))
        assert await self.checksum(service) != before

    async def test_export_every_tensor_once_and_repeatable(self, service: Trainer) -> None:
        """TR-13: `ManifestBuilder` refuses a tensor that comes twice or leaves its buffer."""
        first, second = [(await self.weights(service)).build() for _ in range(2)]
        assert first == second
        assert first.nbytes > 0

    async def test_export_sharding_is_declared(
        self, service: Trainer, capabilities: TrainerCapabilities
    ) -> None:
        """TR-13."""
        requires(not capabilities.sharded_export, "export by rank 0 alone")
        assert (await self.weights(service)).build().tensors
