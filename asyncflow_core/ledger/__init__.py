"""The control plane of the data store, pure: rows, tasks, leases, groups, credit; no I/O, no clock.

Shells (`reference.InProcessDataStore`, the sharded store) hold payload, wait and tell the time.
"""

from __future__ import annotations

from asyncflow_core.ledger.blocks import Block
from asyncflow_core.ledger.masks import positions_in, runs_in, span
from asyncflow_core.ledger.policies import (
    Candidate,
    Fifo,
    LeasePolicy,
    StalestFirst,
    TokenBalanced,
)
from asyncflow_core.ledger.rows import Admission, locate, row_number, runs_of
from asyncflow_core.ledger.store import Claim, Effects, Grant, Intake, Ledger

__all__ = [
    "Admission",
    "Block",
    "Candidate",
    "Claim",
    "Effects",
    "Fifo",
    "Grant",
    "Intake",
    "LeasePolicy",
    "Ledger",
    "StalestFirst",
    "TokenBalanced",
    "locate",
    "positions_in",
    "row_number",
    "runs_in",
    "runs_of",
    "span",
]
