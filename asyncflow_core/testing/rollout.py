"""Conformance of a Rollout; `docs/spec/rollout.md` has the clauses.

A plugin's contract test subclasses `RolloutTests` and gives the fixtures.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncflow_core.batch import Key
from asyncflow_core.errors import (
    AsyncFlowError,
    DataError,
    ServiceClosedError,
    ServiceError,
    UnsupportedCapabilityError,
)
from asyncflow_core.services.rollout import (
    Completion,
    GenerateRequest,
    Rollout,
    RolloutCapabilities,
    SamplingParams,
    SupportsPause,
    SupportsReadback,
    SwitchMode,
)
from asyncflow_core.services.weight_sync import Bucket, WeightSource
from asyncflow_core.testing.aio import collect, eventually, manifest_of, requires, stream

__all__ = ["RolloutTests"]

MakeBuckets = Callable[[int], list[Bucket]]


class RolloutTests:
    """Give `service` (opened, at version 0), `unopened`, `capabilities`, `buckets`, `prompt_ids`.

    The model must be able to go on for `long_tokens` without an ending token.
    """

    long_tokens = 512
    """Response tokens that take long enough for a switch to land between them."""
    logprob_tolerance = 0.0
    """How far equal draws' log-probs may differ between batches of different composition."""

    @pytest.fixture
    async def service(self) -> Rollout:
        raise NotImplementedError("give an opened Rollout")

    @pytest.fixture
    def unopened(self) -> Rollout:
        raise NotImplementedError("give a Rollout that was not opened")

    @pytest.fixture
    def capabilities(self) -> RolloutCapabilities:
        raise NotImplementedError("give the record the plugin registers")

    @pytest.fixture
    def buckets(self) -> MakeBuckets:
        """All weights of the model, other values for each version; stops no response early."""
        raise NotImplementedError("give a function of the version")

    @pytest.fixture
    def prompt_ids(self) -> NDArray[np.int32]:
        raise NotImplementedError("give a prompt")

    # Helpers.

    def requests(
        self, prompt_ids: NDArray[np.int32], count: int, **sampling: object
    ) -> list[GenerateRequest]:
        params = SamplingParams(**{"max_new_tokens": 8, **sampling})  # type: ignore[arg-type]
        return [
            GenerateRequest(Key(0, 0, 0, sample), prompt_ids, params, 1 + sample)
            for sample in range(count)
        ]

    def source(self, buckets: list[Bucket], version: int) -> WeightSource:
        return WeightSource(manifest_of(buckets, version), buckets=stream(buckets))

    async def start(
        self, service: Rollout, requests: list[GenerateRequest]
    ) -> asyncio.Task[list[Completion]]:
        """Requests of which each has begun."""
        task = asyncio.ensure_future(collect(service.generate(requests)))

        async def begun() -> bool:
            stats = await service.stats()
            return stats.running == len(requests) and stats.tokens_generated >= len(requests)

        await eventually(begun)
        return task

    async def switch(
        self, service: Rollout, buckets: list[Bucket], version: int, mode: SwitchMode
    ) -> None:
        await service.stage_weights(self.source(buckets, version))
        await service.commit_weights(version, mode)

    # Life cycle.

    async def test_use_before_open_and_after_aclose_refused(
        self, unopened: Rollout, prompt_ids: NDArray[np.int32]
    ) -> None:
        """RO-1."""
        for _ in range(2):
            with pytest.raises(ServiceClosedError):
                await unopened.stats()
            with pytest.raises(ServiceClosedError):
                await collect(unopened.generate(self.requests(prompt_ids, 1)))
            await unopened.aclose()

    async def test_aclose_while_generating_raises_closed(
        self, service: Rollout, prompt_ids: NDArray[np.int32]
    ) -> None:
        """RO-1."""
        task = await self.start(
            service, self.requests(prompt_ids, 1, max_new_tokens=self.long_tokens)
        )
        await service.aclose()
        with pytest.raises(ServiceClosedError):
            await task

    async def test_aclose_after_use_refuses_every_call(
        self, service: Rollout, buckets: MakeBuckets, prompt_ids: NDArray[np.int32]
    ) -> None:
        """RO-1."""
        await collect(service.generate(self.requests(prompt_ids, 1)))
        await service.stage_weights(self.source(buckets(1), 1))
        for _ in range(2):
            await service.aclose()
            for call in (
                collect(service.generate(self.requests(prompt_ids, 1))),
                service.stage_weights(self.source(buckets(1), 1)),
                service.commit_weights(1, SwitchMode.DRAIN),
                service.abort(),
                service.stats(),
            ):
                with pytest.raises(ServiceClosedError):
                    await call

    # Generating.

    async def test_generate_many_each_ends_once_and_agrees(
        self, service: Rollout, prompt_ids: NDArray[np.int32]
    ) -> None:
        """RO-2, RO-3."""
        requests = self.requests(prompt_ids, 20)
        completions = await collect(service.generate(requests))
        assert sorted(c.key for c in completions) == sorted(r.key for r in requests)
        for completion in completions:
            tokens = len(completion.response_ids)
            assert 1 <= tokens <= 8
            assert completion.response_ids.dtype == np.int32
            assert completion.behaviour_logprobs.shape == (tokens,)
            assert completion.behaviour_logprobs.dtype == np.float32
            assert completion.versions.tolist() == [[0, tokens]]
            assert completion.finish_reason == ("length" if tokens == 8 else "stop")

    async def test_generate_nothing_yields_nothing(self, service: Rollout) -> None:
        """RO-2."""
        assert await collect(service.generate([])) == []

    async def test_stop_token_ends_the_response_and_is_kept(
        self,
        service: Rollout,
        prompt_ids: NDArray[np.int32],
        capabilities: RolloutCapabilities,
    ) -> None:
        """RO-3; the response without it, cut after the first such token."""
        requires("stop_token_ids" in capabilities.sampling, "sampling: stop_token_ids")
        (whole,) = await collect(service.generate(self.requests(prompt_ids, 1, temperature=0.0)))
        ids = whole.response_ids.tolist()
        stop = ids[len(ids) // 2]
        (cut,) = await collect(
            service.generate(self.requests(prompt_ids, 1, temperature=0.0, stop_token_ids=(stop,)))
        )
        assert cut.response_ids.tolist() == ids[: ids.index(stop) + 1]
        assert cut.finish_reason == "stop"

    @pytest.mark.parametrize("fault", ["no prompt", "no tokens"])
    async def test_generate_bad_request_none_started(
        self, service: Rollout, prompt_ids: NDArray[np.int32], fault: str
    ) -> None:
        """RO-4."""
        good, bad = self.requests(prompt_ids, 2)
        if fault == "no prompt":
            bad = replace(bad, prompt_ids=prompt_ids[:0])
        else:
            bad = replace(bad, sampling=replace(bad.sampling, max_new_tokens=0))
        with pytest.raises(DataError, match=str(bad.key)):
            await collect(service.generate([good, bad]))
        stats = await service.stats()
        assert (stats.running, stats.waiting, stats.tokens_generated) == (0, 0, 0)

    async def test_sampling_undeclared_field_refused(
        self,
        service: Rollout,
        prompt_ids: NDArray[np.int32],
        capabilities: RolloutCapabilities,
    ) -> None:
        """RO-5."""
        for name, value in {"top_p": 0.5, "top_k": 2, "min_p": 0.1, "stop": ("x",)}.items():
            if name not in capabilities.sampling:
                with pytest.raises(AsyncFlowError):
                    await collect(service.generate(self.requests(prompt_ids, 1, **{name: value})))

    async def test_seeds_equal_draw_equal_tokens_in_any_batch(
        self,
        service: Rollout,
        prompt_ids: NDArray[np.int32],
        capabilities: RolloutCapabilities,
    ) -> None:
        """RO-6."""
        requires(capabilities.seeds, "seeds")
        together = {c.key: c for c in await collect(service.generate(self.requests(prompt_ids, 9)))}
        for request in self.requests(prompt_ids, 9)[::4]:
            (alone,) = await collect(service.generate([request]))
            same = together[request.key]
            assert alone.response_ids.tolist() == same.response_ids.tolist()
            gap = np.abs(alone.behaviour_logprobs - same.behaviour_logprobs).max()
            assert gap <= self.logprob_tolerance

    async def test_seeds_other_seeds_draw_other_tokens(
        self,
        service: Rollout,
        prompt_ids: NDArray[np.int32],
        capabilities: RolloutCapabilities,
    ) -> None:
        """RO-6: else a group of samples is one sample."""
        requires(capabilities.seeds, "seeds")
        drawn = await collect(service.generate(self.requests(prompt_ids, 20)))
        assert len({tuple(c.response_ids.tolist()) for c in drawn}) > 1

    async def test_greedy_logprobs_are_those_of_temperature_one(
        self,
        service: Rollout,
        prompt_ids: NDArray[np.int32],
        capabilities: RolloutCapabilities,
    ) -> None:
        """RO-7; top-k 1 at temperature 1 draws the same tokens."""
        requires("top_k" in capabilities.sampling, "sampling: top_k")
        (greedy,) = await collect(service.generate(self.requests(prompt_ids, 1, temperature=0.0)))
        (drawn,) = await collect(service.generate(self.requests(prompt_ids, 1, top_k=1)))
        assert greedy.response_ids.tolist() == drawn.response_ids.tolist()
        gap = np.abs(greedy.behaviour_logprobs - drawn.behaviour_logprobs).max()
        assert gap <= self.logprob_tolerance

    async def test_greedy_any_seed_equal_tokens(
        self, service: Rollout, prompt_ids: NDArray[np.int32]
    ) -> None:
        """RO-7."""
        requests = self.requests(prompt_ids, 3, temperature=0.0)
        completions = await collect(service.generate(requests))
        assert len({tuple(c.response_ids.tolist()) for c in completions}) == 1
        assert all((c.behaviour_logprobs <= 0).all() for c in completions)

    async def test_truncated_draw_logprobs_over_whole_vocabulary(
        self,
        service: Rollout,
        prompt_ids: NDArray[np.int32],
        capabilities: RolloutCapabilities,
    ) -> None:
        """RO-8: renormalised after top-k 1, the log-prob would be 0."""
        requires("top_k" in capabilities.sampling, "sampling: top_k")
        (completion,) = await collect(service.generate(self.requests(prompt_ids, 1, top_k=1)))
        assert (completion.behaviour_logprobs < 0).all()

    async def test_generate_closed_early_engine_is_free(
        self, service: Rollout, prompt_ids: NDArray[np.int32]
    ) -> None:
        """RO-9."""
        task = await self.start(
            service, self.requests(prompt_ids, 4, max_new_tokens=self.long_tokens)
        )
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

        async def idle() -> bool:
            stats = await service.stats()
            return (stats.running, stats.waiting) == (0, 0)

        await eventually(idle)
        assert len(await collect(service.generate(self.requests(prompt_ids, 2)))) == 2

    async def test_abort_some_end_with_what_they_have(
        self, service: Rollout, prompt_ids: NDArray[np.int32]
    ) -> None:
        """RO-10; one that is not there is none."""
        requests = self.requests(prompt_ids, 3, max_new_tokens=self.long_tokens)
        task = await self.start(service, requests)
        assert await service.abort([Key(9, 9, 9, 9)]) == await service.abort([]) == 0
        assert await service.abort([requests[0].key]) == 1
        assert await service.abort() == 2
        for completion in await task:
            assert completion.finish_reason == "abort"
            tokens = len(completion.response_ids)
            assert 0 < tokens < self.long_tokens
            assert len(completion.behaviour_logprobs) == completion.versions[:, 1].sum() == tokens

    async def test_prefix_continued_equals_uninterrupted(
        self,
        service: Rollout,
        prompt_ids: NDArray[np.int32],
        capabilities: RolloutCapabilities,
    ) -> None:
        """RO-11."""
        requires(capabilities.prefix, "prefix")
        (request,) = self.requests(prompt_ids, 1)
        (whole,) = await collect(service.generate([request]))
        prefix = Completion(
            key=request.key,
            response_ids=whole.response_ids[:3],
            behaviour_logprobs=whole.behaviour_logprobs[:3],
            versions=np.array([[0, 3]], np.int32),
            finish_reason="abort",
        )
        (continued,) = await collect(service.generate([replace(request, prefix=prefix)]))
        assert continued.behaviour_logprobs[:3].tolist() == prefix.behaviour_logprobs.tolist()
        assert continued.versions.tolist() == whole.versions.tolist()
        if capabilities.seeds:
            assert continued.response_ids.tolist() == whole.response_ids.tolist()

    async def test_pause_no_tokens_until_resume(
        self,
        service: Rollout,
        prompt_ids: NDArray[np.int32],
        capabilities: RolloutCapabilities,
    ) -> None:
        """RO-12."""
        requires(capabilities.pause, "pause")
        assert isinstance(service, SupportsPause)
        task = await self.start(
            service, self.requests(prompt_ids, 2, max_new_tokens=self.long_tokens)
        )
        await service.pause()
        before = await service.stats()
        for _ in range(20):
            await asyncio.sleep(0)
        assert await service.stats() == before
        await service.resume()
        assert [c.finish_reason for c in await task] == ["length"] * 2

    # Weights.

    async def test_stage_right_bytes_checksum_agrees_and_old_serves(
        self, service: Rollout, buckets: MakeBuckets
    ) -> None:
        """RO-13."""
        source = self.source(buckets(1), 1)
        staged = await service.stage_weights(source)
        assert (staged.version, staged.checksum) == (1, source.manifest.checksum)
        assert staged.nbytes == source.manifest.nbytes
        assert (await service.stats()).version == 0

    async def test_stage_corrupt_bucket_checksum_differs(
        self, service: Rollout, buckets: MakeBuckets
    ) -> None:
        """RO-14."""
        good = buckets(1)
        manifest = manifest_of(good, 1)
        damaged = [Bucket(bucket.specs, bucket.data.copy()) for bucket in good]
        damaged[-1].data[len(damaged[-1].data) // 2] ^= 1
        staged = await service.stage_weights(WeightSource(manifest, buckets=stream(damaged)))
        assert staged.checksum != manifest.checksum

    async def test_stage_again_replaces_what_was_staged(
        self, service: Rollout, buckets: MakeBuckets
    ) -> None:
        """RO-13, RO-16."""
        for version in (1, 2):
            await service.stage_weights(self.source(buckets(version), version))
        with pytest.raises(ServiceError):
            await service.commit_weights(1, SwitchMode.DRAIN)
        await service.commit_weights(2, SwitchMode.DRAIN)
        assert (await service.stats()).version == 2

    @pytest.mark.parametrize("end", ["error", "cancelled"])
    async def test_stage_cut_off_leaves_the_version_before_whole_or_not_staged(
        self, service: Rollout, buckets: MakeBuckets, prompt_ids: NDArray[np.int32], end: str
    ) -> None:
        """RO-15; and it can be staged again."""
        greedy = self.requests(prompt_ids, 1, temperature=0.0)
        await self.switch(service, buckets(1), 1, SwitchMode.DRAIN)
        (of_one,) = await collect(service.generate(greedy))
        await self.switch(service, buckets(2), 2, SwitchMode.DRAIN)
        await service.stage_weights(self.source(buckets(1), 1))
        all_of_three, came, never = buckets(3), asyncio.Event(), asyncio.Event()

        async def cut_off() -> AsyncIterator[Bucket]:
            yield all_of_three[0]
            came.set()
            if end == "error":
                raise DataError("cut")
            await never.wait()

        source = WeightSource(manifest_of(all_of_three, 3), buckets=cut_off())
        staging = asyncio.ensure_future(service.stage_weights(source))
        await came.wait()
        if end == "cancelled":
            staging.cancel()
        with pytest.raises((DataError, asyncio.CancelledError)):
            await staging
        with pytest.raises(ServiceError):
            await service.commit_weights(3, SwitchMode.DRAIN)
        with contextlib.suppress(ServiceError):
            await service.commit_weights(1, SwitchMode.DRAIN)
            (again,) = await collect(service.generate(greedy))
            assert again.behaviour_logprobs.tolist() == of_one.behaviour_logprobs.tolist()
        await self.switch(service, all_of_three, 3, SwitchMode.DRAIN)
        (after,) = await collect(service.generate(greedy))
        assert after.versions[:, 0].tolist() == [3]

    @pytest.mark.parametrize("fault", ["name", "shape", "missing", "broken"])
    async def test_stage_fails_old_serves_and_nothing_is_staged(
        self, service: Rollout, buckets: MakeBuckets, prompt_ids: NDArray[np.int32], fault: str
    ) -> None:
        """RO-15."""
        first, *rest = buckets(1)
        spec = first.specs[0]
        changed = {
            "name": [Bucket((replace(spec, name="no.such"), *first.specs[1:]), first.data), *rest],
            "shape": [Bucket((replace(spec, shape=(1,)), *first.specs[1:]), first.data), *rest],
            "missing": [Bucket(first.specs[1:], first.data), *rest],
            "broken": [first, *rest],
        }[fault]
        source = self.source(changed, 1)
        if fault == "broken":
            source = replace(source, buckets=stream([first], error=DataError("cut")))
        with pytest.raises(DataError):
            await service.stage_weights(source)
        with pytest.raises(ServiceError):
            await service.commit_weights(1, SwitchMode.DRAIN)
        (completion,) = await collect(service.generate(self.requests(prompt_ids, 1)))
        assert completion.versions[:, 0].tolist() == [0]

    async def test_commit_other_version_or_mode_refused(
        self, service: Rollout, buckets: MakeBuckets, capabilities: RolloutCapabilities
    ) -> None:
        """RO-16."""
        await service.stage_weights(self.source(buckets(1), 1))
        with pytest.raises(ServiceError):
            await service.commit_weights(2, SwitchMode.DRAIN)
        for mode in set(SwitchMode) - capabilities.switch_modes:
            with pytest.raises(UnsupportedCapabilityError):
                await service.commit_weights(1, mode)
        assert (await service.stats()).version == 0

    @pytest.mark.parametrize("mode", list(SwitchMode))
    async def test_commit_idle_later_tokens_are_of_it(
        self,
        service: Rollout,
        buckets: MakeBuckets,
        prompt_ids: NDArray[np.int32],
        capabilities: RolloutCapabilities,
        mode: SwitchMode,
    ) -> None:
        """RO-17."""
        requires(mode in capabilities.switch_modes, f"switch_modes: {mode}")
        (before,) = await collect(service.generate(self.requests(prompt_ids, 1, temperature=0.0)))
        await self.switch(service, buckets(3), 3, mode)
        assert (await service.stats()).version == 3
        (after,) = await collect(service.generate(self.requests(prompt_ids, 1, temperature=0.0)))
        assert after.versions.tolist() == [[3, len(after.response_ids)]]
        assert after.behaviour_logprobs.tolist() != before.behaviour_logprobs.tolist()

    async def test_drain_running_end_under_old_weights(
        self,
        service: Rollout,
        buckets: MakeBuckets,
        prompt_ids: NDArray[np.int32],
        capabilities: RolloutCapabilities,
    ) -> None:
        """RO-18."""
        requires(SwitchMode.DRAIN in capabilities.switch_modes, "switch_modes: drain")
        source = self.source(buckets(1), 1)  # made before: it must not outlast what runs
        long = self.requests(prompt_ids, 2, max_new_tokens=self.long_tokens)
        running = await self.start(service, long)
        await service.stage_weights(source)
        commit = asyncio.ensure_future(service.commit_weights(1, SwitchMode.DRAIN))
        await asyncio.sleep(0)
        waiting = await collect(service.generate(self.requests(prompt_ids, 2)))
        await commit
        assert {v for c in await running for v in c.versions[:, 0].tolist()} == {0}
        assert {v for c in waiting for v in c.versions[:, 0].tolist()} == {1}

    @pytest.mark.parametrize("mode", [SwitchMode.IN_FLIGHT, SwitchMode.ABORT_RESUME])
    async def test_switch_running_go_on_and_lose_nothing(
        self,
        service: Rollout,
        buckets: MakeBuckets,
        prompt_ids: NDArray[np.int32],
        capabilities: RolloutCapabilities,
        mode: SwitchMode,
    ) -> None:
        """RO-19, RO-20."""
        requires(mode in capabilities.switch_modes, f"switch_modes: {mode}")
        weights = buckets(1)
        running = await self.start(
            service, self.requests(prompt_ids, 2, max_new_tokens=self.long_tokens)
        )
        await self.switch(service, weights, 1, mode)
        for completion in await running:
            assert completion.finish_reason == "length"
            assert completion.versions[:, 0].tolist() == [0, 1]
            assert completion.versions[:, 1].sum() == self.long_tokens
        stats = await service.stats()
        assert stats.tokens_kept > 0
        assert stats.tokens_lost == 0

    @pytest.mark.parametrize("mode", list(SwitchMode))
    async def test_commit_cancelled_and_repeated_switches_once(
        self,
        service: Rollout,
        buckets: MakeBuckets,
        prompt_ids: NDArray[np.int32],
        capabilities: RolloutCapabilities,
        mode: SwitchMode,
    ) -> None:
        """RO-22; cancelled while the engine is between two tokens and so cannot obey at once."""
        requires(mode in capabilities.switch_modes, f"switch_modes: {mode}")
        greedy = self.requests(prompt_ids, 1, temperature=0.0)
        (before,) = await collect(service.generate(greedy))
        source = self.source(buckets(1), 1)
        running = await self.start(
            service, self.requests(prompt_ids, 2, max_new_tokens=self.long_tokens)
        )
        await service.stage_weights(source)
        commit = asyncio.ensure_future(service.commit_weights(1, mode))
        await asyncio.sleep(0)
        commit.cancel()
        await asyncio.gather(commit, return_exceptions=True)
        with contextlib.suppress(ServiceError):  # the first one had happened
            await service.commit_weights(1, mode)
        assert (await service.stats()).version == 1
        await running
        (after,) = await collect(service.generate(greedy))
        assert after.versions[:, 0].tolist() == [1]
        assert after.behaviour_logprobs.tolist() != before.behaviour_logprobs.tolist()
        with pytest.raises(ServiceError):
            await service.commit_weights(1, mode)

    async def test_read_weights_are_those_that_serve(
        self, service: Rollout, buckets: MakeBuckets, capabilities: RolloutCapabilities
    ) -> None:
        """RO-21."""
        requires(capabilities.readback, "readback")
        assert isinstance(service, SupportsReadback)
        await self.switch(service, buckets(1), 1, SwitchMode.DRAIN)
        await service.stage_weights(self.source(buckets(2), 2))
        for bucket in buckets(1):
            wanted = list(reversed(bucket.specs))
            found = [
                (spec.name, spec.dtype, spec.shape, served.tensor_bytes(spec).tobytes())
                async for served in service.read_weights(wanted)
                for spec in served.specs
            ]
            assert found == [
                (spec.name, spec.dtype, spec.shape, bucket.tensor_bytes(spec).tobytes())
                for spec in wanted
            ]
