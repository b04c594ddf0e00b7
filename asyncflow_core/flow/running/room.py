"""What rows take in the data store. Pure."""

from __future__ import annotations

from asyncflow_core.config import WorkflowConfig
from asyncflow_core.errors import ConfigError
from asyncflow_core.services.data_store import StoreStats

__all__ = ["check_room", "row_bytes"]

_TOKEN_BYTES = 32
"""Bytes one response token may take over all per-token columns."""
_ROW_BYTES = 1024
"""Bytes of a row beside its tokens."""


def row_bytes(prompt_tokens: int, new_tokens: int) -> int:
    """The largest size one row may grow to."""
    return 4 * prompt_tokens + _TOKEN_BYTES * new_tokens + _ROW_BYTES


def check_room(stats: StoreStats, flow: WorkflowConfig, groups: int, nbytes: int) -> None:
    """Refuse what would wait for ever: a batch that can never be whole in the store.

    Args:
        stats: of the store.
        flow: batches.
        groups: that a batch starts.
        nbytes: of one row, at most.

    Raises:
        ConfigError: the batches that may be open at a time do not fit.
    """
    batches = min(flow.steps, flow.bound + 1)
    rows = batches * groups * flow.group_size
    for unit, needed, there in (
        ("rows", rows, stats.capacity_rows),
        ("bytes", rows * nbytes, stats.capacity_bytes),
    ):
        if there < needed:
            raise ConfigError(
                f"the data store holds {there} {unit}, but {batches} batch(es) of {groups} x "
                f"{flow.group_size} rows of up to {nbytes} bytes may be open, which take {needed}; "
                f"raise its capacity_{unit}, or make batches smaller"
            )
