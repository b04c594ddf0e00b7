"""A client of the run that makes calls of any form harms only itself."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_core.errors import WireDecodeError

from .conftest import served
from .hostile import CORPUS, EXAMPLES, Hostile

FILES = sorted(CORPUS.glob("*.json"))

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([-1, 0, 1, 2**20, 2**31, 2**36, 2**40, 2**62, 2**63 - 1]),
    st.sampled_from([{"number": "nan"}, {"number": "inf"}, {"number": "-inf"}, 1e300]),
    st.sampled_from(["", "good", "bad", "any", "step", "train", "x" * 5000, "$lease", "$rows"]),
    st.text(max_size=8),
    st.binary(max_size=40).map(lambda data: {"hex": data.hex()}),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(lambda some: {"int64": some}),
    st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3), max_size=3).map(
        lambda some: {"int64": list(map(list, some))}
    ),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3).map(lambda some: {"int32": some}),
    st.lists(st.sampled_from(["prompt_ids", "reward", "response_ids", 1, None]), max_size=3),
)  # fmt: skip


@st.composite
def mutated(draw):
    """A good call with other values in some of its places."""
    method = draw(st.sampled_from(sorted(EXAMPLES)))
    arguments = copy.deepcopy(EXAMPLES[method])
    for _ in range(draw(st.integers(0, 3))):
        if not arguments:
            break
        place, into = draw(st.integers(0, len(arguments) - 1)), arguments
        while isinstance(into[place], list) and into[place] and draw(st.booleans()):
            into = into[place]
            place = draw(st.integers(0, len(into) - 1))
        into[place] = draw(VALUES)
    if draw(st.integers(0, 9)) == 0:
        arguments = draw(VALUES)
    return method, arguments


async def outlives(calls, *, tcp=False):
    """A store that was told these calls serves others; what each was answered."""
    directory = Path(tempfile.mkdtemp(prefix="af-"))
    try:
        async with served(directory, tcp=tcp) as options, Hostile(options) as it:
            await it.check()
            answers = await it.say(calls)
            await it.check()
            return answers
    finally:
        shutil.rmtree(directory)


@settings(max_examples=60, deadline=None)
@given(st.lists(mutated(), min_size=1, max_size=8))
def test_calls_of_any_form_change_nothing_for_others(calls):
    asyncio.run(outlives(calls))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
async def test_kept_calls_are_refused_in_words_or_harmless(path):
    kept = json.loads(path.read_text())
    answers = await outlives(kept["calls"])
    if kept["refused"]:
        assert all(answers), answers


async def test_malformed_call_names_the_argument():
    (answer,) = await outlives([("store.lease", ["bad", 7, None, 1, None, "fifo", 60.0, 0.0])])
    assert isinstance(answer, WireDecodeError)
    assert "store.lease is malformed: argument 1 is int 7" in str(answer)
