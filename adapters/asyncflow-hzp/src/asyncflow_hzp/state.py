"""Parameters and optimizer state by name: whole ones in memory, this rank's stretches on disk.

On disk every tensor is flat: a rank writes the stretch of each parameter that its optimizer shard
covers, under the parameter's name (`storage`). What is read back is cut anew, so another number of
ranks or another tuple can go on from it. Persistent buffers, which every rank has whole, are those
of the first rank that has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncflow_core.errors import ConfigError, DataError
from asyncflow_hzp.links import agree
from asyncflow_hzp.optimizer import Optimizer
from asyncflow_hzp.sharded import Sharded
from asyncflow_hzp.storage import read_stretches, tensor_names, write_stretches
from asyncflow_hzp.units import parts_of

__all__ = ["load_state", "named_whole", "persistent_buffers", "save_state"]


def _weights(model: Sharded) -> dict[str, tuple[torch.Tensor, int, int]]:
    """This rank's stretches of all parameters, trainable or not; replicas give none twice."""
    found = {}
    for unit in model.units:
        low, high = unit.shard
        for entry in unit.entries:
            begin, end = max(entry.start, low), min(entry.stop, high)
            if begin < end:
                values = unit.master[begin - low : end - low]
                found[entry.name] = (values, begin - entry.start, entry.param.numel())
    return found


def _buffers(model: Sharded) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Persistent buffers by name, and whether this rank is the first that has them."""
    parts = parts_of(model.module)
    for prefix, module in model.module.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                name = f"{prefix}.{key}" if prefix else key
                yield name, buffer, model.rank < parts.get(id(module), 1)


def persistent_buffers(model: Sharded) -> dict[str, torch.Tensor]:
    """Those of this rank's modules, by name."""
    return {name: buffer for name, buffer, _ in _buffers(model)}


def _moments(
    optimizer: Optimizer,
) -> tuple[dict[str, tuple[torch.Tensor, int, int]], dict[str, Any]]:
    """Optimizer state: stretches by `<state>.<parameter>`, and what is one value for all."""
    found: dict[str, tuple[torch.Tensor, int, int]] = {}
    common: dict[str, Any] = {}
    for unit, piece, _, entries in optimizer.layout():
        for key, value in optimizer.state_of(unit, piece).items():
            if not isinstance(value, torch.Tensor):
                common[key] = ["value", value]
            elif value.shape != piece.shape and value.numel() == 1:
                common[key] = ["tensor", float(value)]
            elif value.shape != piece.shape:
                raise ConfigError(
                    f"the optimizer's {key!r} of {entries[0][0].name!r} has the shape "
                    f"{tuple(value.shape)}, its parameter here {tuple(piece.shape)}; a checkpoint "
                    f"holds single numbers and tensors of the parameter's shape: choose another "
                    f"optimizer, or save with optimizer=None"
                )
            else:
                for entry, begin, end, at in entries:
                    own = value.view(-1)[at : at + end - begin]
                    found[f"{key}.{entry.name}"] = (own, begin, entry.param.numel())
    return found, common


def save_state(
    directory: Path | str, model: Sharded, optimizer: Optimizer | None
) -> dict[str, Any]:
    """Write this rank's part of parameters, persistent buffers and optimizer state.

    Ranks do not wait for each other: meet at a barrier before anyone reads.

    Args:
        directory: on a file system that all ranks see; made if it is not there.
        model: what `shard` returned.
        optimizer: None writes no optimizer state.

    Returns:
        What one rank must keep beside it for `load_state`, fit for msgpack.

    Raises:
        ConfigError: the optimizer keeps tensors of other shapes than the parameters'.
    """
    directory = Path(directory)
    first = [unit for unit in model.units if unit.layout.is_first_replica]
    names = {entry.name for unit in first for entry in unit.entries}
    weights = {name: value for name, value in _weights(model).items() if name in names}
    for name, buffer, first_has_it in _buffers(model):
        if first_has_it:
            weights[name] = (buffer.detach().reshape(-1), 0, buffer.numel())
    moments, common = ({}, {}) if optimizer is None else _moments(optimizer)
    write_stretches(directory / "model", weights, model.rank)
    if optimizer is None:
        return {"kinds": [], "common": {}}
    kinds = sorted({key.split(".", 1)[0] for key in moments})
    moments = {key: v for key, v in moments.items() if key.split(".", 1)[1] in names}
    write_stretches(directory / "optimizer", moments, model.rank)
    return {"kinds": kinds, "common": common}


def load_state(
    directory: Path | str,
    model: Sharded,
    optimizer: Optimizer | None,
    record: Mapping[str, Any],
) -> None:
    """Take over what `save_state` wrote and returned. All ranks call it.

    Everything is read, on all ranks, before anything is changed on any.

    Raises:
        DataError: it does not fit the model, or is damaged or not complete.
        ServiceError: another rank could not read its part.
    """
    directory = Path(directory)
    buffers = {name: (torch.empty_like(b), b) for name, b, _ in _buffers(model)}
    weights = {
        name: (torch.empty_like(values), start, total)
        for name, (values, start, total) in _weights(model).items()
    }
    whole = {name: (read.view(-1), 0, read.numel()) for name, (read, _) in buffers.items()}
    states: list[dict[str, Any]] = []
    failure: DataError | None = None
    try:
        read_stretches(directory / "model", {**weights, **whole})
        if optimizer is not None:
            states = _read_moments(directory / "optimizer", model, optimizer, record)
    except DataError as error:
        failure = error
    agree(failure, model.device)
    model.residency.drop(model.units)
    mine = _weights(model)
    with torch.no_grad():
        for name, (values, _, _) in weights.items():
            mine[name][0].copy_(values)
        for read, buffer in buffers.values():
            buffer.copy_(read)
    for unit in model.units:
        model.residency.publish(unit)
    if optimizer is not None:
        optimizer.restore(states)


def _read_moments(
    directory: Path, model: Sharded, optimizer: Optimizer, record: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The state of every stretch, in the order of `Optimizer.layout`.

    Which tensors a parameter has, its group says: optimizers of different kinds have different
    ones, and a rank that holds nothing of a group cannot know from its own.
    """
    kinds: dict[str, set[str]] = {}
    if record["kinds"]:
        by_param: dict[str, set[str]] = {}
        for key in tensor_names(directory):
            kind, param = key.split(".", 1)
            by_param.setdefault(param, set()).add(kind)
        for unit in model.units:
            for entry in unit.entries if unit.trainable else ():
                found = by_param.get(entry.name, set())
                kinds.setdefault(optimizer.group_of(entry), set()).update(found)
        missing = sorted(set(record["kinds"]) - set().union(*kinds.values()))
        if missing:
            raise DataError(f"checkpoint {directory} has no {missing} of any of its parameters")
    states: list[dict[str, Any]] = []
    stretches: dict[str, tuple[torch.Tensor, int, int]] = {}
    for _, piece, group, entries in optimizer.layout():
        state: dict[str, Any] = {
            key: torch.zeros_like(piece, requires_grad=False) for key in kinds.get(group, ())
        }
        for key, flat in state.items():
            for entry, begin, end, at in entries:
                own = flat.view(-1)[at : at + end - begin]
                stretches[f"{key}.{entry.name}"] = (own, begin, entry.param.numel())
        for key, (kind, value) in record["common"].items():
            state[key] = optimizer.number(value, piece, group) if kind == "tensor" else value
        states.append(state)
    read_stretches(directory, stretches)
    return states


def named_whole(model: Sharded, *, master: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, whole, on every rank; a tensor is valid until the next unit's.

    All ranks run through it, and compute nothing else meanwhile.

    Args:
        model: what `shard` returned.
        master: give the optimizer's weights instead of those of the forward.
    """
    for unit in model.units:
        flat = model.collect(unit, unit.master) if master else model.gathered(unit)
        for entry in unit.entries:
            yield entry.name, entry.view(flat)
