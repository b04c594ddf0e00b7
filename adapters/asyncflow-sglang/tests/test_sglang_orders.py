"""Orders of events that one would have to be lucky to meet: a server that can be held up."""

import asyncio

import pytest
from sglang_helpers import make_buckets, make_requests, switch, versioned_model
from sglang_stand import Stand, make_rollout

from asyncflow_core.errors import EngineError, PeerLostError, ServiceTimeoutError
from asyncflow_core.services.rollout import SwitchMode
from asyncflow_core.testing.aio import collect, eventually
from asyncflow_core.testing.generation import make_source
from asyncflow_sglang import dispatch, server
from asyncflow_sglang.health import State
from asyncflow_sglang.proof import Proof


async def answers(service, stand):
    """A completion that this server made."""
    (completion,) = await collect(service.generate(make_requests(1, max_new_tokens=1)))
    assert stand.asked[-1]["rid"]
    return completion.versions.tolist()


async def test_server_on_its_way_up_serves_what_was_committed_meanwhile(model):
    async with Stand() as stand, Stand() as other:
        addresses = (stand.url, other.url)
        async with make_rollout(model, addresses=addresses) as service:
            first = service._servers["rollout/server-0"]
            await switch(service, model, 1, SwitchMode.DRAIN)
            stand.gate.clear()
            stand.label = "default"  # it was restarted, and is given version 1
            await eventually(lambda: stand.label.startswith("loading"))
            await switch(service, model, 2, SwitchMode.DRAIN)
            stand.gate.set()
            await eventually(lambda: first.ready)
            assert (first.health.label, stand.label) == (other.label, other.label)
            assert other.label.startswith("2.")


async def test_commit_that_is_cancelled_leaves_the_version_before_everywhere(model):
    async with Stand() as stand, Stand() as other:
        addresses = (stand.url, other.url)
        async with make_rollout(model, addresses=addresses) as service:
            await switch(service, model, 1, SwitchMode.DRAIN)
            before = stand.label
            other.gate.clear()
            commit = asyncio.ensure_future(switch(service, model, 2, SwitchMode.DRAIN))
            await eventually(lambda: stand.label.startswith("2."))
            await eventually(lambda: other.label.startswith("loading"))
            commit.cancel()
            with pytest.raises(asyncio.CancelledError):
                await commit
            other.gate.set()
            servers = service._servers.values()
            await eventually(lambda: all(server.ready for server in servers))
            assert stand.label == other.label == before
            assert await answers(service, stand) == [[1, 1]]
            assert (await service.stats()).version == 1


async def test_first_commit_that_fails_gives_the_models_own_weights_back(model):
    async with Stand() as stand, make_rollout(model, addresses=(stand.url,)) as service:
        stand.extra["/update_weights_from_disk"] = (400, '{"message": "no room"}')
        with pytest.raises(EngineError, match=r"no server took version 1: .*no room"):
            await switch(service, model, 1, SwitchMode.DRAIN)
        assert stand.label.startswith("loading.")
        del stand.extra["/update_weights_from_disk"]
        assert await answers(service, stand) == [[0, 1]]
        assert stand.label.startswith("0.")
        assert any(model.glob("*.safetensors")), "they are not ours to remove"


async def test_drain_does_not_wait_for_a_server_that_says_nothing(model):
    async with Stand() as stand, Stand() as other:
        options = {"addresses": (stand.url, other.url), "stall_s": 0.5, "affinity_slack": 0}
        async with make_rollout(model, **options) as service:
            stand.talks.clear()
            task = asyncio.ensure_future(
                collect(service.generate(make_requests(2, max_new_tokens=1)))
            )
            await eventually(lambda: stand.asked and other.asked)
            await switch(service, model, 1, SwitchMode.DRAIN)
            assert len(await task) == 2  # what it had went to the other
            stand.talks.set()
            await eventually(lambda: stand.label.startswith("1."))


async def test_hung_update_ends_when_its_server_is_lost(model):
    async with Stand() as stand, Stand() as other:
        options = {"addresses": (stand.url, other.url), "poll_timeout_s": 1.0}
        async with make_rollout(model, **options) as service:
            stand.gate.clear()
            commit = asyncio.ensure_future(switch(service, model, 1, SwitchMode.DRAIN))
            await eventually(lambda: stand.label.startswith("loading"))
            stand.extra["/model_info"] = (500, "hung")
            await commit  # long before update_timeout_s
            assert service._servers["rollout/server-0"].health.state is State.LOST
            del stand.extra["/model_info"]
            stand.gate.set()
            await eventually(lambda: stand.label.startswith("1."))


async def test_pause_and_resume_outlive_a_server_that_does_not(model):
    async with Stand() as stand, Stand() as other:
        addresses = (stand.url, other.url)
        async with make_rollout(model, addresses=addresses) as service:
            first = service._servers["rollout/server-0"]
            await service.pause()
            await stand.down()
            await eventually(lambda: first.health.state is State.LOST)
            await service.resume()
            assert await answers(service, other) == [[0, 1]]
            stand.label = "default"
            await stand.up()
            await eventually(lambda: first.ready)


async def test_drain_while_paused_ends_with_the_pause(model):
    async with Stand() as stand, make_rollout(model, addresses=(stand.url,)) as service:
        stand.talks.clear()
        task = asyncio.ensure_future(collect(service.generate(make_requests(1, max_new_tokens=1))))
        await eventually(lambda: stand.asked)
        await service.pause()
        commit = asyncio.ensure_future(switch(service, model, 1, SwitchMode.DRAIN))
        await asyncio.sleep(0)
        await service.resume()
        stand.talks.set()
        await commit
        assert [c.versions.tolist() for c in await task] == [[[0, 1]]]


async def test_pause_is_no_reason_to_lose_patience(model):
    async with (
        Stand() as stand,
        make_rollout(model, addresses=(stand.url,), wait_s=0.1) as service,
    ):
        await service.pause()
        task = asyncio.ensure_future(collect(service.generate(make_requests(1, max_new_tokens=1))))
        done, _ = await asyncio.wait({task}, timeout=1.5)  # it looks once a second
        assert not done
        await service.resume()
        assert len(await task) == 1


async def test_commit_while_paused_and_no_server_is_up_ends_when_one_came(model):
    async with Stand() as stand, make_rollout(model, addresses=(stand.url,)) as service:
        (server,) = service._servers.values()
        await service.pause()
        await stand.down()
        await eventually(lambda: server.health.state is State.LOST)
        commit = asyncio.ensure_future(switch(service, model, 1, SwitchMode.DRAIN))
        stand.label = "default"
        await stand.up()
        await commit
        assert not server.ready
        await service.resume()
        assert await answers(service, stand) == [[1, 1]]


async def test_staging_that_fails_late_leaves_no_files(model, tmp_path, monkeypatch):
    options = {"directory": tmp_path}
    async with Stand() as stand, make_rollout(model, addresses=(stand.url,), **options) as service:

        async def unprovable(*arguments):
            raise EngineError("not the model's")

        monkeypatch.setattr(Proof, "prepare", unprovable)
        with pytest.raises(EngineError, match="not the model's"):
            await switch(service, model, 1, SwitchMode.DRAIN)
        assert [file.name for file in service._own.path.iterdir()] == ["owner"]


async def test_server_that_another_run_takes_is_left_to_it_by_name(model, caplog):
    async with (
        Stand() as stand,
        make_rollout(model, addresses=(stand.url,), wait_s=1.0) as service,
    ):
        await switch(service, model, 1, SwitchMode.DRAIN)
        ours = stand.label
        for number in range(3):
            await eventually(lambda: stand.label == ours)
            stand.label = f"{number}.other"
        with pytest.raises(ServiceTimeoutError, match="another run gives it weights too"):
            await collect(service.generate(make_requests(1)))
        assert stand.label == "2.other"
    assert "it serves weights '0.other', not" in caplog.text


async def test_router_that_is_away_is_named_at_open_and_waited_for_later(model, caplog):
    async with Stand() as stand, Stand() as router:
        chosen = {"addresses": (stand.url,), "router": router.url}
        await router.down()
        with pytest.raises(EngineError, match=f"router {router.url} is not up after 0.3 s"):
            await make_rollout(model, **chosen, start_timeout_s=0.3).__aenter__()
        await router.up()
        stand.label = "default"
        router.extra["/workers"] = (200, '{"workers": [{"url": "http://elsewhere:1"}]}')
        async with make_rollout(model, **chosen, wait_s=1.0) as service:
            assert "sends requests to http://elsewhere:1 too" in caplog.text
            router.label = stand.label
            await router.down()
            words = f"is the router {router.url} up.*wait_s 1"
            with pytest.raises(ServiceTimeoutError, match=words):
                await collect(service.generate(make_requests(1)))
            task = asyncio.ensure_future(
                collect(service.generate(make_requests(1, max_new_tokens=1)))
            )
            await asyncio.sleep(0)
            await router.up()
            assert len(await task) == 1


async def test_request_that_comes_right_after_a_commit_began_waits_for_the_new_weights(model):
    async with Stand() as stand, make_rollout(model, addresses=(stand.url,)) as service:
        stand.talks.clear()
        old = asyncio.ensure_future(collect(service.generate(make_requests(1, max_new_tokens=1))))
        await eventually(lambda: stand.asked)
        await service.stage_weights(make_source(make_buckets(versioned_model(model, 1)), 1))
        commit = asyncio.ensure_future(service.commit_weights(1, SwitchMode.DRAIN))
        await asyncio.sleep(0)
        new = asyncio.ensure_future(answers(service, stand))
        await asyncio.sleep(0)
        stand.talks.set()
        await commit
        assert [c.versions.tolist() for c in await old] == [[[0, 1]]]
        assert await new == [[1, 1]]


async def test_tokens_of_strangers_behind_a_router_are_charged_to_no_server(model, monkeypatch):
    monkeypatch.setattr(dispatch, "_TRIES", 3)
    async with Stand() as stand, Stand() as router:
        chosen = {"addresses": (stand.url,), "router": router.url}
        async with make_rollout(model, **chosen, wait_s=1.0) as service:
            router.label = "7.other"
            with pytest.raises(EngineError, match=r"no token in 4 attempts.*\('7.other', 1\)"):
                await collect(service.generate(make_requests(1, max_new_tokens=1)))
            router.label = stand.label
            (completion,) = await collect(service.generate(make_requests(1, max_new_tokens=1)))
            assert completion.versions.tolist() == [[0, 1]]


async def test_unproven_weights_have_no_trusted_name_and_a_failed_proof_pauses(model, monkeypatch):
    """By log-probs, for which the server must run."""
    seen = []

    async def by_logprobs(proof, *arguments, **options):
        seen.append((proof.held.version, stand.label.partition(".")[0], stand.stands))
        if proof.held.version == 2:
            raise EngineError("it holds something else")

    monkeypatch.setattr(Proof, "by_logprobs", by_logprobs)
    options = {"verify": "logprobs"}
    async with Stand() as stand, make_rollout(model, addresses=(stand.url,), **options) as service:
        await switch(service, model, 1, SwitchMode.DRAIN)
        assert stand.label.startswith("1.")
        with pytest.raises(EngineError, match="it holds something else"):
            await switch(service, model, 2, SwitchMode.DRAIN)
        assert (stand.label.partition(".")[0], stand.stands) == ("loading", True)
        assert await answers(service, stand) == [[1, 1]]
        assert not stand.stands
    loading = [(version, "loading", False) for version in (1, 2, 1)]
    assert seen == [(0, "default", False), *loading]


def own_stand(model, stand, path, monkeypatch, **options):
    """A rollout that takes the stand for a server it started; each start is a line in a file."""
    script, starts = path / "python", path / "starts"
    script.write_text(f"#!/bin/sh\necho $* >> {starts}\nexec sleep 600\n")
    script.chmod(0o700)
    monkeypatch.setattr(server, "free_port", lambda: stand.port)
    service = make_rollout(model, python=str(script), **options)
    stand.label = service._labels.started
    return service, lambda: len(starts.read_text().splitlines())


@pytest.mark.multiproc
async def test_own_server_that_cannot_be_brought_up_is_started_again(model, tmp_path, monkeypatch):
    async with Stand() as stand:
        service, starts = own_stand(model, stand, tmp_path, monkeypatch, restarts=1)
        async with service:
            (ours,) = service._servers.values()
            process = ours._process
            stand.extra["/update_weights_from_disk"] = (400, '{"message": "no room"}')
            with pytest.raises(EngineError, match="no server took version 1"):
                await switch(service, model, 1, SwitchMode.DRAIN)
            await eventually(lambda: ours._process is not process)
            assert "ended with status" in process.ended
            stand.label = service._labels.started
            await eventually(lambda: ours.ready)
            assert await answers(service, stand) == [[0, 1]]
            assert starts() == 2


@pytest.mark.multiproc
async def test_own_server_that_cannot_be_brought_up_is_given_up(
    model, tmp_path, monkeypatch, caplog
):
    async with Stand() as stand:
        service, starts = own_stand(model, stand, tmp_path, monkeypatch, restarts=0)
        async with service:
            (ours,) = service._servers.values()
            stand.extra["/update_weights_from_disk"] = (400, '{"message": "no room"}')
            with pytest.raises(EngineError, match="no server took version 1"):
                await switch(service, model, 1, SwitchMode.DRAIN)
            await eventually(lambda: ours._process.ended)
            with pytest.raises(PeerLostError, match=r"no server left.*brought up.*no room"):
                await collect(service.generate(make_requests(1)))
            assert starts() == 1
    assert "is given up" in caplog.text


async def test_only_a_row_of_futile_attempts_counts_as_waiting(model):
    """Neither a pause before the first attempt, nor one in it, nor one between two."""
    async with (
        Stand(refuses=2) as stand,
        make_rollout(model, addresses=(stand.url,), wait_s=0.5) as service,
    ):
        (ours,) = service._servers.values()
        await service.pause()
        stand.talks.clear()
        task = asyncio.ensure_future(collect(service.generate(make_requests(1, max_new_tokens=1))))
        await asyncio.wait({task}, timeout=0.6)
        await service.resume()
        await eventually(lambda: stand.asked)
        await service.pause()
        await asyncio.wait({task}, timeout=0.6)
        stand.talks.set()
        await eventually(lambda: service._dispatch.waiting == 1)
        assert not len(ours.requests)
        await asyncio.wait({task}, timeout=0.6)
        await service.resume()
        (completion,) = await task
        assert completion.response_ids.tolist() == [1]
        assert len(stand.asked) == 3


async def test_request_whose_tokens_are_always_thrown_away_fails(model, monkeypatch):
    monkeypatch.setattr(dispatch, "_TRIES", 2)
    async with Stand() as stand, make_rollout(model, addresses=(stand.url,)) as service:
        stand.made = "default"
        words = r"no token in 3 attempts.*tokens of weights .*\('default', 1\)"
        with pytest.raises(EngineError, match=words):
            await collect(service.generate(make_requests(1, max_new_tokens=1)))
        assert (await service.stats()).tokens_lost == 3


async def test_long_drain_is_no_reason_to_lose_patience(model):
    async with (
        Stand() as stand,
        make_rollout(model, addresses=(stand.url,), wait_s=0.1) as service,
    ):
        stand.talks.clear()
        old = asyncio.ensure_future(collect(service.generate(make_requests(1, max_new_tokens=1))))
        await eventually(lambda: stand.asked)
        commit = asyncio.ensure_future(switch(service, model, 1, SwitchMode.DRAIN))
        (ours,) = service._servers.values()
        await eventually(lambda: ours.switching)
        new = asyncio.ensure_future(answers(service, stand))
        done, _ = await asyncio.wait({new}, timeout=1.5)  # it looks once a second
        assert not done
        stand.talks.set()
        await commit
        assert len(await old) == 1
        assert await new == [[1, 1]]


async def test_request_that_is_aborted_as_it_gets_its_place_is_not_generated(model):
    async with Stand() as stand, make_rollout(model, addresses=(stand.url,)) as service:
        (ours,) = service._servers.values()
        await service.pause()
        task = asyncio.ensure_future(collect(service.generate(make_requests(1))))
        await eventually(lambda: service._dispatch.waiting == 1)
        ours.paused = False
        ours.reconsider()
        assert service._dispatch.waiting == 0  # it has a place, and did not run since
        await service.abort()
        (completion,) = await task
        assert (completion.finish_reason, stand.asked) == ("abort", [])
        assert not service._dispatch._routing.running(ours.name)


async def test_who_waits_for_an_abort_lets_the_loop_sleep(model, monkeypatch):
    async with Stand() as stand, make_rollout(model, addresses=(stand.url,)) as service:
        (ours,) = service._servers.values()
        stand.talks.clear()
        stand.hears.clear()
        task = asyncio.ensure_future(collect(service.generate(make_requests(1))))
        await eventually(lambda: stand.asked)
        task.cancel()
        await eventually(lambda: "/abort_request" in stand.called)
        assert len(ours.requests) == 1
        selector = asyncio.get_running_loop()._selector
        select, sleeps = selector.select, []
        monkeypatch.setattr(selector, "select", lambda t=None: sleeps.append(t != 0) or select(t))
        waiting = asyncio.gather(ours.requests.drained(), ours.requests.end())
        await asyncio.wait({waiting}, timeout=0.3)
        assert not waiting.done()
        assert any(sleeps)  # a busy loop never waits
        stand.hears.set()
        await waiting
        stand.talks.set()
        with pytest.raises(asyncio.CancelledError):
            await task
