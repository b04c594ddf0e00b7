"""Stretches of flat tensors on disk: torch.distributed.checkpoint's safetensors storage.

Every tensor is flat on disk; a rank writes the stretches it holds into a file of its own. Ranks
write and read without talking: the storage layer's own planning would send pickled objects between
them.
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

__all__ = ["read_stretches", "tensor_names", "write_stretches"]


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


def tensor_names(directory: Path) -> set[str]:
    """The names of all tensors of which any rank wrote a part.

    Raises:
        DataError: a file is damaged, or there is none.
    """
    with _reading(directory) as reader:
        return set(reader.read_metadata().state_dict_metadata)
