"""Parameters and optimizer state by name: whole ones in memory, this rank's stretches on disk.

On disk every tensor is flat: a rank writes the stretch of each parameter that its optimizer shard
covers, under the parameter's name, through torch.distributed.checkpoint's safetensors storage.
What is read back is cut anew, so another number of ranks or another tuple can go on from it.
Persistent buffers, which every rank has whole, are those of the first rank that has them.

Ranks write and read without talking: the storage layer's own planning would send pickled objects
between them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from asyncflow_core.errors import DataError
from asyncflow_hzp.links import agree
from asyncflow_hzp.optimizer import Optimizer
from asyncflow_hzp.sharded import Sharded
from asyncflow_hzp.units import parts_of

__all__ = ["load_state", "named_whole", "read_stretches", "save_state", "write_stretches"]


class _Stretch:
    """A part of a flat tensor, as torch.distributed.checkpoint asks for it."""

    def __init__(self, values: torch.Tensor, start: int, total: int) -> None:
        self.values = values
        self._total = torch.Size([total])
        self._chunk = ChunkStorageMetadata(torch.Size([start]), torch.Size([values.numel()]))

    def size(self) -> torch.Size:
        """Of the whole flat tensor."""
        return self._total

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        data = TensorWriteData(
            chunk=self._chunk,
            properties=TensorProperties.create_from_tensor(self.values),
            size=self._total,
        )
        index = MetadataIndex(name, self._chunk.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk]


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The values to write."""
        stretch: _Stretch = self.state_dict[index.fqn]
        return stretch.values


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the stretches as they are."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The values to fill."""
        stretch: _Stretch = self.state_dict[index.fqn]
        return stretch.values


class _Writer(HuggingFaceStorageWriter):
    """Writes one rank's file."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(str(path), save_distributed=True)
        self._rank = rank

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the file by the rank instead of by the plan, of which there is one here."""
        return [replace(plan, storage_data={"shard_index": self._rank + 1}) for plan in plans]


@contextmanager
def _quiet() -> Iterator[None]:
    """That it works for one process is what we want, and no reason to warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def write_stretches(
    directory: Path, stretches: Mapping[str, tuple[torch.Tensor, int, int]], rank: int
) -> None:
    """Write stretches [values, start, total] by name, beside what other ranks write."""
    directory.mkdir(parents=True, exist_ok=True)
    if stretches:
        state = {name: _Stretch(*stretch) for name, stretch in stretches.items()}
        with _quiet():
            planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            writer = _Writer(directory, rank)
            save(state, storage_writer=writer, planner=planner, no_dist=True)


def read_stretches(directory: Path, stretches: Mapping[str, tuple[torch.Tensor, int, int]]) -> None:
    """Fill stretches with what any ranks wrote.

    Raises:
        DataError: a tensor is missing, has another length, or a file is damaged or missing.
    """
    state = {name: _Stretch(*stretch) for name, stretch in stretches.items()}
    if not state:
        return
    with _reading(directory) as reader:
        found = reader.read_metadata().state_dict_metadata
        for name, stretch in state.items():
            _check_there(directory, name, stretch, found.get(name))
        with _quiet():
            planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            load(state, storage_reader=reader, planner=planner, no_dist=True)


@contextmanager
def _reading(directory: Path) -> Iterator[HuggingFaceStorageReader]:
    """A reader; what it stumbles over becomes a DataError."""
    try:
        yield HuggingFaceStorageReader(str(directory))
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{directory.parent} is no checkpoint of this model: {error}") from error


def _check_there(directory: Path, name: str, stretch: _Stretch, found: Any) -> None:
    """Refuse a tensor of another length, or of which no file has a part: it would stay unset."""
    size = getattr(found, "size", None)
    if size != stretch.size():
        raise DataError(
            f"checkpoint {directory}: tensor {name!r} has "
            f"{'nothing' if size is None else size.numel()}, the model has "
            f"{stretch.size().numel()} elements; shape and name must not differ, and every "
            f"rank's file must be there"
        )
    (own,) = stretch.__create_chunk_list__()
    at, stop = own.offsets[0], own.offsets[0] + own.sizes[0]
    for start, length in sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in found.chunks):
        if start <= at:
            at = max(at, start + length)
    if at < stop:
        raise DataError(
            f"checkpoint {directory}: no file has element {at} of tensor {name!r}; the file of "
            f"the rank that wrote it is missing"
        )


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
            elif value.shape != piece.shape:
                common[key] = ["tensor", float(value)]
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
    """
    directory = Path(directory)
    first = {unit.name for unit in model.units if unit.layout.is_first_replica}
    names = {entry.name for unit in model.units if unit.name in first for entry in unit.entries}
    weights = {name: value for name, value in _weights(model).items() if name in names}
    for name, buffer, first_has_it in _buffers(model):
        if first_has_it:
            weights[name] = (buffer.detach().reshape(-1), 0, buffer.numel())
    write_stretches(directory / "model", weights, model.rank)
    if optimizer is None:
        return {"kinds": [], "common": {}}
    moments, common = _moments(optimizer)
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
    model.residency.drop_all()
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
        with _reading(directory) as reader:
            names = reader.read_metadata().state_dict_metadata
        by_param: dict[str, set[str]] = {}
        for key in names:
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
            state[key] = torch.tensor(value) if kind == "tensor" else value
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
