"""The control plane of the data store, pure: rows, tasks, leases, groups, credit; no I/O, no clock.

Shells (`reference.InProcessDataStore`, the sharded store) hold payload, wait and tell the time.
"""

from __future__ import annotations

from asyncflow_core.ledger.policies import (
    Candidate,
    Fifo,
    LeasePolicy,
    StalestFirst,
    TokenBalanced,
)
from asyncflow_core.ledger.rows import Admission, Group, locate, row_number, samples_in
from asyncflow_core.ledger.store import Claim, Effects, Grant, Intake, Ledger

__all__ = [
    "Admission",
    "Candidate",
    "Claim",
    "Effects",
    "Fifo",
    "Grant",
    "Group",
    "Intake",
    "LeasePolicy",
    "Ledger",
    "StalestFirst",
    "TokenBalanced",
    "locate",
    "row_number",
    "samples_in",
]
