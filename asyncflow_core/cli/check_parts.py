"""Uses the smaller things that plugins make, which have no conformance kit, and looks at it.

What a tokenizer, prompts, a stage, a loss or a lease policy does is the plugin's own business; what
core relies on is checked here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncflow_core.batch import Batch, Column, GroupKey, Key
from asyncflow_core.cli.check_offer import Finding, Offer
from asyncflow_core.errors import AsyncFlowError, DataError
from asyncflow_core.flow.building import build, described
from asyncflow_core.flow.planning.stages import plugin_contract
from asyncflow_core.parts import KEY_COLUMN, PartContext, PromptRecord
from asyncflow_core.reference.data_store import InProcessDataStore
from asyncflow_core.schema import CANONICAL, validate
from asyncflow_core.services.data_store import TaskSpec
from asyncflow_core.services.trainer import LossOutput, loss_columns

__all__ = ["use_part"]

_ROWS, _GROUP = 4, 2
_PROMPTS, _HELD_OUT = 16, 1024
_STEP, _TOLERANCE = 1e-4, 1e-3
_TEXT = "ab"


def use_part(offer: Offer, context: PartContext) -> list[Finding]:
    """Findings on what a sound offer made; none for kinds of which nothing is relied on."""
    assert offer.plugin is not None
    use = _USES.get(offer.plugin.kind)
    if use is None:
        return []
    found: list[Finding] = []
    try:
        found.extend(use(offer, context))
    except Exception as error:  # noqa: BLE001 - a plugin's code may do anything
        found.append(Finding("use", "failed", described(error)))
    return found


def _finding(what: str, text: str, faults: list[str]) -> Finding:
    return Finding(what, "failed" if faults else "passed", "; ".join(faults) or text)


def _tokenizer(offer: Offer, context: PartContext) -> Iterator[Finding]:
    made, faults = offer.made, []
    size = made.vocab_size
    ends = [token for token in made.eos_token_ids if not 0 <= token < size]
    if ends:
        faults.append(f"eos_token_ids has {ends}, and vocab_size is {size}")
    yield _finding("ids", f"vocab_size {size}, eos_token_ids {made.eos_token_ids}", faults)
    try:
        ids = made.encode(_TEXT)
    except DataError as error:
        yield Finding("texts", "not checked", f"{_TEXT!r} cannot be encoded: {error}")
        return
    outside = [token for token in ids if not 0 <= token < size]
    text = made.decode(np.array(ids, np.int32))
    faults = [f"encode({_TEXT!r}) gives {outside}, vocab_size is {size}"] if outside else []
    faults += [] if isinstance(text, str) else [f"decode gives a {type(text).__name__}, no text"]
    yield _finding("texts", f"{_TEXT!r} becomes {ids} becomes {text!r}", faults)


def _prompts(offer: Offer, context: PartContext) -> Iterator[Finding]:
    assert offer.plugin is not None
    made, tokenizer = offer.made, context.tokenizer
    promised = plugin_contract(offer.plugin, offer.options).writes
    first = list(itertools.islice(made.train(0), _PROMPTS))
    faults = [] if first else ["train(0) gives none"]
    size = tokenizer.vocab_size if tokenizer else None
    faults += list(_record_faults(first, promised, size))
    if set(made.fields) != set(promised):
        faults.append(f"`fields` is {sorted(made.fields)}, its contract says {sorted(promised)}")
    yield _finding("train", f"looked at {len(first)}, with {', '.join(promised) or 'no'}", faults)
    twin = build(offer.plugin, offer.options, context)
    again = list(itertools.islice(twin.train(0), _PROMPTS))
    same = [_plain(record) for record in first] == [_plain(record) for record in again]
    differ = "built twice with one seed, they differ; draw by ctx.seed alone"
    yield _finding("repeatable", "equal seeds give equal prompts", [] if same else [differ])
    held = list(itertools.islice(made.evaluation(), _HELD_OUT + 1))
    faults = list(_record_faults(held, promised, size))
    if len(held) > _HELD_OUT:
        yield _finding("evaluation", f"more than {_HELD_OUT}: it has to end", faults)
        return
    known = {tuple(record.prompt_ids) for record in held}
    trained = [list(r.prompt_ids) for r in first if tuple(r.prompt_ids) in known]
    faults += [f"the held-out prompt {trained[0]} is among train(0)"] if trained else []
    yield _finding("evaluation", f"{len(held)} held out, none of those looked at", faults)


def _plain(record: PromptRecord) -> tuple[list[int], dict[str, Any]]:
    return list(record.prompt_ids), dict(record.fields)


def _record_faults(
    records: list[PromptRecord], promised: tuple[str, ...], size: int | None
) -> Iterator[str]:
    for number, record in enumerate(records):
        ids = list(record.prompt_ids)
        if not ids or min(ids) < 0 or (size is not None and max(ids) >= size):
            yield f"prompt {number} has the ids {ids}; one or more below {size} are expected"
            return
        if set(record.fields) != set(promised):
            yield f"prompt {number} has {sorted(record.fields)}, not {sorted(promised)}"
            return


def _stage(offer: Offer, context: PartContext) -> Iterator[Finding]:
    assert offer.plugin is not None
    contract = plugin_contract(offer.plugin, offer.options)
    batch = _batch()
    unknown = sorted({*contract.reads} - {*batch} - {KEY_COLUMN})
    if unknown:
        yield Finding(
            "call", "not checked", f"it reads {', '.join(unknown)}, which only your data has"
        )
        return
    written = offer.made(batch.select((*contract.reads, KEY_COLUMN)))
    yield _finding(
        "call",
        f"{_ROWS} rows in groups of {_GROUP} give {', '.join(written)}",
        list(_written_faults(batch, written, contract.writes)),
    )


def _written_faults(
    batch: Batch, written: Mapping[str, Any], writes: tuple[str, ...]
) -> Iterator[str]:
    if set(written) != set(writes):
        yield f"it returns {sorted(written)}, its contract says {sorted(writes)}"
        return
    for name, values in written.items():
        if len(values) != batch.rows:
            yield f"column {name!r} has {len(values)} rows, the batch has {batch.rows}"
            continue
        try:
            column = values if isinstance(values, Column) else _column(name, values)
            keys = [Key(*row) for row in batch[KEY_COLUMN].array.tolist()]
            validate(Batch({name: column}), keys, response=batch["response_ids"])
        except AsyncFlowError as error:
            yield str(error)


def _column(name: str, values: Any) -> Column:
    spec = CANONICAL.get(name)
    if spec is None or spec.kind == "object":
        return Column.objects(values)
    make = Column.ragged if spec.kind == "ragged" else Column.dense
    return make(values, spec.dtype)


def _loss(offer: Offer, context: PartContext) -> Iterator[Finding]:
    able, batch = offer.able, _batch()
    if able.arrays != "numpy":
        yield Finding("call", "not checked", f"it works on {able.arrays} arrays, core has none")
        return
    unknown = sorted({*able.reads} - {*batch})
    if unknown or able.needs_entropy:
        what = ", ".join([*unknown, *(["the entropy"] if able.needs_entropy else [])])
        yield Finding("call", "not checked", f"it needs {what}, which only a run has")
        return
    columns = loss_columns(batch, able.reads)
    logprobs = batch["behaviour_logprobs"].array.astype(np.float64) + 0.05
    output = offer.made(logprobs, columns, offer.options)
    faults = list(_output_faults(output, logprobs))
    yield _finding("call", f"sum {getattr(output, 'sum', None)}", faults)
    if not faults:
        yield _gradient(offer, output, logprobs, columns)


def _output_faults(output: Any, logprobs: NDArray[np.float64]) -> Iterator[str]:
    if not isinstance(output, LossOutput):
        yield f"it returns a {type(output).__name__}, no LossOutput"
        return
    if not (np.isfinite(output.sum) and output.weight >= 0):
        yield f"sum {output.sum} and weight {output.weight} have to be finite, the weight >= 0"
    if np.shape(output.grad) != logprobs.shape:
        yield f"grad has the shape {np.shape(output.grad)}, a number a token is {logprobs.shape}"


def _gradient(
    offer: Offer, output: LossOutput, logprobs: NDArray[np.float64], columns: Mapping[str, Any]
) -> Finding:
    """Against differences of the sum, token by token."""
    for token, given in enumerate(np.asarray(output.grad, np.float64)):
        shift = np.zeros_like(logprobs)
        shift[token] = _STEP
        above, below = (
            float(offer.made(logprobs + side * shift, columns, offer.options).sum)
            for side in (1, -1)
        )
        found = (above - below) / (2 * _STEP)
        if abs(found - given) > _TOLERANCE * max(1.0, abs(found)):
            fault = f"grad is {given:g} for token {token}, differences of the sum give {found:g}"
            return Finding("gradient", "failed", fault)
    return Finding("gradient", "passed", f"that of the sum, for {len(logprobs)} tokens")


def _batch() -> Batch:
    """All canonical columns, of two groups of two rows."""
    rng = np.random.default_rng(0)
    lengths = [3, 1, 2, 4]

    def per_token(make: Any, dtype: Any) -> Column:
        return Column.ragged([make(length) for length in lengths], dtype)

    keys = [[0, 0, row // _GROUP, row % _GROUP] for row in range(_ROWS)]
    sampling = {"max_new_tokens": 4, "temperature": 1.0}
    return Batch(
        {
            KEY_COLUMN: Column.dense(np.array(keys, np.int64)),
            "prompt_ids": Column.ragged([[1, 0]] * _ROWS, np.int32),
            "response_ids": per_token(lambda n: rng.integers(0, 2, n), np.int32),
            "loss_mask": per_token(np.ones, np.uint8),
            "versions": Column.ragged([[[0, length]] for length in lengths], np.int32),
            "reward": Column.dense([1.0, 0.0, 0.5, 0.25], np.float32),
            "finish_reason": Column.objects(["length"] * _ROWS),
            "sampling": Column.objects([sampling] * _ROWS),
            **{
                name: per_token(lambda n: -rng.random(n), np.float32)
                for name in (
                    *("behaviour_logprobs", "ref_logprobs", "proximal_logprobs"),
                    *("advantages", "values"),
                )
            },
        }
    )


def _lease_policy(offer: Offer, context: PartContext) -> Iterator[Finding]:
    assert offer.plugin is not None
    window = getattr(offer.made, "window", None)
    faults = [] if isinstance(window, int) and window >= 1 else ["it is 1 or more groups"]
    yield _finding("window", f"{window} groups", [f"window is {window!r}; {f}" for f in faults])
    if not faults:
        leased = asyncio.run(_leased(offer.made))
        fault = f"of 8 rows it hands out {leased}; `order` returns every candidate once"
        yield _finding(
            "order",
            "8 rows in 3 leases, each once",
            [] if sorted(leased) == [*range(8)] else [fault],
        )


async def _leased(policy: Any) -> list[int]:
    task = TaskSpec("task", ("prompt_ids",))
    async with InProcessDataStore(policies={"mine": policy}) as store:
        await store.register(task)
        prompts = Column.ragged([np.ones(1 + row % 3) for row in range(8)], np.int32)
        keys = [GroupKey(0, 0, row) for row in range(8)]
        await store.put(Batch({"prompt_ids": prompts}), keys=keys)
        found = []
        for _ in range(3):
            lease = await store.lease("task", requester="check", limit_rows=3, policy="mine")
            found += [info.key.sequence for info in lease.rows] if lease else []
        return found


_USES = {
    "lease_policy": _lease_policy,
    "loss": _loss,
    "prompts": _prompts,
    "stage": _stage,
    "tokenizer": _tokenizer,
}
