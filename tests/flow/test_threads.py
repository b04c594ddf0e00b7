"""The thread that blocking work runs on."""

import asyncio
import subprocess
import sys
import threading

import pytest

from asyncflow_core.flow.working.threads import DaemonThread


@pytest.fixture
def thread():
    made = DaemonThread("work")
    yield made
    made.shutdown(wait=False, cancel_futures=True)


async def test_calls_run_in_order_on_one_thread_and_give_their_results(thread):
    loop, seen = asyncio.get_running_loop(), []

    def call(number):
        seen.append(number)
        return threading.current_thread().name

    names = await asyncio.gather(*(loop.run_in_executor(thread, call, n) for n in range(5)))
    assert set(names) == {"work"}
    assert seen == [0, 1, 2, 3, 4]


async def test_a_call_that_raises_gives_its_error_and_the_next_one_runs(thread):
    loop = asyncio.get_running_loop()
    with pytest.raises(ZeroDivisionError):
        await loop.run_in_executor(thread, lambda: 1 // 0)
    assert await loop.run_in_executor(thread, lambda: 3) == 3


def test_shutdown_cancels_what_waits_and_takes_nothing_more(thread):
    gate, begun = threading.Event(), threading.Event()

    def hold():
        begun.set()
        gate.wait()

    running, waiting = thread.submit(hold), thread.submit(lambda: None)
    assert begun.wait(10)
    thread.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    gate.set()
    assert running.result(10) is None
    with pytest.raises(RuntimeError, match="takes no calls"):
        thread.submit(lambda: None)


def test_a_call_that_never_returns_does_not_hold_up_the_process():
    code = (
        "import threading; from asyncflow_core.flow.working.threads import DaemonThread;"
        "t = DaemonThread('hung'); t.submit(threading.Event().wait);"
        "t.shutdown(wait=False, cancel_futures=True)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
