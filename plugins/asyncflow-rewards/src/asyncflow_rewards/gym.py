"""Everything that touches reasoning-gym: datasets by name, entries that travel, faults in words.

It is imported inside functions only: importing it takes a second.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = [
    "create",
    "dataset_faults",
    "draw_faults",
    "plain",
    "restore",
    "template_faults",
    "verdict",
]

# Verifiers that compare with a tuple: msgpack makes lists of tuples, and a list never equals one.
_TUPLES = {"arc_agi": ("input", "output"), "rearc": ("input", "output")}


def create(name: str, options: Mapping[str, Any], *, seed: int = 0, size: int = 1) -> Any:
    """A reasoning-gym dataset."""
    import reasoning_gym  # type: ignore[import-untyped]

    return reasoning_gym.create_dataset(name, **options, seed=seed, size=size)


def plain(value: Any) -> Any:
    """The same in what msgpack carries: str keys, lists, built-in numbers, str for the rest."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(entry) for entry in value), key=repr)
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, str):
        return plain(value.tolist())
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return int(value)
    return str(value)


def restore(entry: Mapping[str, Any], dataset: str) -> dict[str, Any]:
    """An entry that travelled, as its verifier wants it."""
    metadata = entry.get("metadata", {})
    tuples = {name: _as_tuple(metadata[name]) for name in _TUPLES.get(dataset, ())}
    return {**entry, "metadata": {**metadata, **tuples}} if tuples else dict(entry)


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(entry) for entry in value) if isinstance(value, list) else value


def dataset_faults(name: str) -> list[str]:
    """What is wrong with a dataset name: reasoning-gym missing, or an unknown name."""
    try:
        from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped]
    except ImportError as error:
        return [f"reasoning-gym cannot be imported ({error}); try: pip install reasoning-gym"]
    if name in DATASETS:
        return []
    near = difflib.get_close_matches(name, DATASETS, n=3)
    hint = (
        f"did you mean {' or '.join(map(repr, near))}?" if near else "see reasoning-gym's gallery"
    )
    return [f"reasoning-gym has no dataset {name!r} (it has {len(DATASETS)}); {hint}"]


def draw_faults(name: str, options: Mapping[str, Any]) -> tuple[list[str], Any]:
    """What keeps a dataset from making entries, and the first entry where nothing does."""
    faults = dataset_faults(name)
    if faults:
        return faults, None
    try:
        return [], create(name, options)[0]
    except Exception as error:  # noqa: BLE001 - each dataset checks its options in its own way
        said = f"{type(error).__name__}: {error}"
        return [f"reasoning-gym's {name!r} refuses dataset_options {dict(options)}: {said}"], None


def template_faults(template: str, entry: Mapping[str, Any]) -> list[str]:
    """What keeps a template from being filled with an entry."""
    try:
        template.format(**entry)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        return [
            f"template {template!r} cannot be filled ({type(error).__name__}: {error}); an entry "
            f"has {sorted(entry)}, its metadata {sorted(map(str, entry['metadata']))}"
        ]
    return []


def verdict(score_answer: Callable[[Any, Any], Any], answer: Any, entry: Any) -> Any:
    """A verifier's score, or its exception in words."""
    try:
        return score_answer(answer, entry)
    except Exception as error:  # noqa: BLE001 - a verifier may raise anything
        return repr(error)
