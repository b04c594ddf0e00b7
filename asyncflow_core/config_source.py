"""From YAML, overrides and Python values to a `RunConfig`, with every fault and its place.

Defaults < file < overrides. A fault reads `config.yaml:12: workflow.max_stalenes: unknown key; did
you mean 'max_staleness'?`; all faults of one source come at once.
"""

from __future__ import annotations

import difflib
import io
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from asyncflow_core.config import RunConfig, SamplingConfig
from asyncflow_core.errors import ConfigError

__all__ = ["ConfigSource", "dump_yaml", "parse_override", "parse_overrides"]

Path_ = tuple[str | int, ...]
_Model = TypeVar("_Model", bound=BaseModel)
_OVERRIDE = "override"
_FEW = 3
"""Sections that have a key; more are no hint where it belongs."""


class ConfigSource:
    """What was written, and where: a tree of plain values with a place for each path."""

    def __init__(self, tree: dict[str, Any], places: Mapping[Path_, str], base_dir: Path) -> None:
        """Keep a parsed tree; use the class methods to make one."""
        self.tree = tree
        self.base_dir = base_dir
        self._places = dict(places)

    @classmethod
    def from_file(cls, path: str | Path) -> ConfigSource:
        """Read one YAML file.

        Raises:
            ConfigError: the file is missing, is not YAML, has tags (with the lines), or is not a
                mapping.
        """
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"cannot read the configuration {str(file)!r}: {reason}") from error
        try:
            tags = _tags(text)
            tree = None if tags else YAML(typ="rt").load(text)
        except YAMLError as error:
            raise ConfigError(_yaml_fault(file, error)) from error
        if tags:
            raise ConfigError([f"{file}:{line}: {_no_tag(tag)}" for line, tag in tags])
        if not isinstance(tree, CommentedMap):
            raise ConfigError(f"{file}:1: a configuration is a mapping of sections, got {tree!r}")
        places: dict[Path_, str] = {}
        _collect_places(tree, (), str(file), places)
        return cls(_plain(tree), places, file.resolve().parent)

    @classmethod
    def from_values(cls, tree: Mapping[str, Any], *, base_dir: Path | None = None) -> ConfigSource:
        """Use values built in Python."""
        return cls(dict(tree), {}, base_dir or Path.cwd())

    def override(self, path: str, value: Any) -> None:
        """Set one value by its dotted path, as `workflow.max_staleness`."""
        keys: Path_ = tuple(path.split("."))
        node: Any = self.tree
        for depth, key in enumerate(keys[:-1]):
            child = node.get(key)
            if child is None:
                child = node[key] = {}
                self._places[keys[: depth + 1]] = _OVERRIDE
            if not isinstance(child, dict):
                place = ".".join(str(k) for k in keys[: depth + 1])
                raise ConfigError(f"override {path}: {place} is {child!r}, it has no keys")
            node = child
        node[keys[-1]] = value
        for known in [p for p in self._places if p[: len(keys)] == keys]:
            del self._places[known]
        self._places[keys] = _OVERRIDE

    def place(self, path: Path_) -> str:
        """Where the nearest written ancestor of a path stands; empty when built in Python.

        What is wrong with a whole section may come from the file or from an override of a part.
        """
        known = (
            self._places[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self._places
        )
        place = next(known, "")
        if place not in ("", _OVERRIDE) and any(
            found == _OVERRIDE and part[: len(path)] == path for part, found in self._places.items()
        ):
            return f"{place} with an override"
        return place

    def fault(self, path: Path_, message: str) -> str:
        """One fault as text: place, path, what is wrong."""
        place, dotted = self.place(path), ".".join(str(key) for key in path)
        return ": ".join(part for part in (place, dotted, message) if part)

    def build(self) -> RunConfig:
        """Validate the whole tree.

        Raises:
            ConfigError: with every fault.
        """
        config, faults = self.validate(RunConfig, self.tree)
        if faults or config is None:
            raise ConfigError(faults)
        return config

    def validate(
        self, model: type[_Model], values: Any, at: Path_ = ()
    ) -> tuple[_Model | None, list[str]]:
        """Validate a subtree that stands at the path `at`; the model, or the faults."""
        try:
            return model.model_validate(values, context={"base_dir": self.base_dir}), []
        except ValidationError as error:
            # The members of a union fail one by one, all at the same place.
            found: dict[Path_, list[str]] = {}
            for detail in error.errors(include_url=False):
                path = _shown(detail, values)
                found.setdefault(path, []).append(_message(model, detail, at))
            return None, [
                self.fault((*at, *path), "; or ".join(dict.fromkeys(messages)))
                for path, messages in found.items()
            ]


def parse_override(text: str) -> tuple[str, Any]:
    """Split `a.b=value`; the value is YAML, so `1`, `true`, `[0, 1]` and `null` are what they seem.

    Raises:
        ConfigError: no `=`, an empty path, or a value that is not YAML or has a tag.
    """
    path, equals, value = text.partition("=")
    if not equals or not path.strip(".") or ".." in f".{path}.":
        raise ConfigError(f"override {text!r} is not of the form section.key=value")
    try:
        for _, tag in _tags(value):
            raise ConfigError(f"override {text!r}: {_no_tag(tag)}")
        return path, _plain(YAML(typ="safe").load(value))
    except YAMLError as error:
        raise ConfigError(f"override {text!r}: the value is not YAML; quote it") from error


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """Several overrides; the last one of a path counts.

    Raises:
        ConfigError: with the fault of each that is wrong.
    """
    found: dict[str, Any] = {}
    faults: list[str] = []
    for text in texts:
        try:
            path, value = parse_override(text)
            found[path] = value
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    return found


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Plain values as YAML, keys in their order."""
    yaml = YAML(typ="safe")
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    buffer = io.StringIO()
    yaml.dump(dict(values), buffer)
    return buffer.getvalue()


def _tags(text: str) -> list[tuple[int, str]]:
    """Line and tag of every node that has one, as it was written but for handles of its own."""
    return [
        (event.start_mark.line + 1, tag.replace("tag:yaml.org,2002:", "!!"))
        for event in YAML(typ="rt").parse(text)
        if (tag := getattr(event, "tag", None))
    ]


def _no_tag(tag: str) -> str:
    """What a tag asks for is made by code, which a configuration does not run."""
    return f"tags are not read, got {tag}; write the plain value, in quotes if it is text"


def _yaml_fault(file: Path, error: YAMLError) -> str:
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        problem = (error.problem or "not YAML").replace("\n", " ")
        if problem.startswith("but "):  # the end of a sentence
            problem = f"{error.context}, {problem}"
        return f"{file}:{error.problem_mark.line + 1}: {problem}"
    return f"{file}: not YAML: {error}"


def _collect_places(node: Any, path: Path_, file: str, places: dict[Path_, str]) -> None:
    if isinstance(node, CommentedMap):
        children: Iterable[tuple[str | int, Any]] = node.items()
    elif isinstance(node, CommentedSeq):
        children = enumerate(node)
    else:
        return
    lines = node.lc.data or {}
    for key, value in children:
        # What `<<` merged in has no line of its own here: that of its parent stands for it.
        if key in lines:
            places[(*path, key)] = f"{file}:{lines[key][0] + 1}"
        _collect_places(value, (*path, key), file, places)
    if not path:
        places[()] = file


def _plain(node: Any) -> Any:
    """YAML nodes as plain dict, list and scalars; `1e-3` counts as a number, as people mean it."""
    if isinstance(node, Mapping):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    for base in (bool, int, float, str):
        if isinstance(node, base):
            return base(node)
    return node


def _shown(detail: Any, values: Any) -> Path_:
    """Where an error is in `values`: pydantic's location without the names of union members."""
    path: list[str | int] = []
    node = values
    for key in detail["loc"]:
        if isinstance(node, Mapping) and key in node:
            node = node[key]
        elif isinstance(node, list | tuple) and isinstance(key, int):
            node = node[key] if key < len(node) else None
        elif detail["type"] != "missing" or key != detail["loc"][-1]:
            continue
        path.append(key)
    return tuple(path)


def _message(model: type[BaseModel], detail: Any, at: Path_) -> str:
    kind, loc, value = detail["type"], detail["loc"], detail.get("input")
    if kind == "extra_forbidden":
        return _unknown_key(model, loc, at)
    if kind == "missing":
        return "required, and missing"
    message = detail["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return str(message)
    if kind == "model_type":
        message = _no_section(model, loc, value)
    if isinstance(value, date):
        return f"YAML takes it for the date {value}; put it in quotes if it is text"
    return f"{message[0].lower()}{message[1:]}, got {value!r}"


def _no_section(model: type[BaseModel], loc: tuple[str | int, ...], value: Any) -> str:
    """What should stand where something else than a section does."""
    section = _model_at(model, loc)
    fields = list(section.model_fields) if section else []
    if "function" in fields and callable(value):
        return "a function becomes a stage by af.reward(f), or af.stage(f, reads=..., writes=...)"
    if "function" in fields and isinstance(value, str) and ":" in value:
        return f"a section is a mapping, as {{function: '{value}', kind: reward}}"
    if "plugin" in fields:
        name = value if isinstance(value, str) else "NAME"
        return f"a section is a mapping that names its plugin, as {{plugin: {name}}}"
    parent = _model_at(model, loc[:-1])
    field = parent.model_fields.get(str(loc[-1])) if parent and loc else None
    off = ", or null for none" if field and type(None) in get_args(field.annotation) else ""
    return f"a section is a mapping with keys of {', '.join(sorted(fields))}{off}"


def _unknown_key(model: type[BaseModel], loc: tuple[str | int, ...], at: Path_) -> str:
    parent = _model_at(model, loc[:-1])
    fields, key = list(parent.model_fields) if parent else [], str(loc[-1])
    if len(loc) == 1 and at[-1:] == ("options",):  # next door: the keys of the plugin's section
        section = _model_at(RunConfig, at[:-1])
        near_by = section.model_fields if section else {}
        dotted = ".".join(map(str, at[:-1]))
        if key in near_by:
            return f"unknown key; it is no option of the plugin, but {dotted}.{key}"
        if "sampling" in near_by and key in SamplingConfig.model_fields:
            return f"unknown key; it is no option of the plugin, but {dotted}.sampling.{key}"
    homes = _homes(key) if model is RunConfig else []
    if 0 < len(homes) <= _FEW:
        return f"unknown key here; did you mean {' or '.join(map(repr, homes))}?"
    by_plugin = {"plugin", "options"} <= set(fields)
    # That `slots` looks a little like `options` tells nobody where to put it.
    meant = [name for name in fields if name != "options" or key.startswith("opt")]
    near = difflib.get_close_matches(key, meant, n=1, cutoff=0.5)
    here = f"keys here are {', '.join(sorted(fields))}" if fields else "there are no keys here"
    hint = f"did you mean {near[0]!r}?" if near else here
    if by_plugin and not near:
        hint += "; what is the plugin's own stands in `options`"
    return f"unknown key; {hint}"


def _homes(key: str) -> list[str]:
    """The sections of a configuration that have a key, as dotted paths of it."""
    found = [key] if key in RunConfig.model_fields else []
    for name, field in RunConfig.model_fields.items():
        section = _model_at(RunConfig, (name,))
        if section is None or _is_container(field.annotation):  # names of the user's own
            continue
        found += [f"{name}.{key}"] if key in section.model_fields else []
        for inner in section.model_fields:
            below = _model_at(section, (inner,))
            found += [f"{name}.{inner}.{key}"] if below and key in below.model_fields else []
    return found


def _model_at(model: Any, loc: tuple[str | int, ...]) -> type[BaseModel] | None:
    for key in loc:
        if isinstance(model, type) and issubclass(model, BaseModel):
            found = model.model_fields.get(str(key))
            model = found.annotation if found else None
        else:  # inside a dict or a list: the key is the user's own
            arguments = [a for a in get_args(model) if isinstance(a, type)]
            model = arguments[-1] if arguments else None
        members = [a for a in get_args(model) if isinstance(a, type) and issubclass(a, BaseModel)]
        if members and not _is_container(model):
            model = members[0]
    return model if isinstance(model, type) and issubclass(model, BaseModel) else None


def _is_container(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) in (dict, list, tuple)
