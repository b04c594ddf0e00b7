"""The public signatures of core, one a line, so that every change of them is seen in review.

Update after a change on purpose: .venv/bin/python tests/meta/api.py
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

from pydantic import BaseModel

SNAPSHOT = Path(__file__).with_name("api.txt")
UPDATE = ".venv/bin/python tests/meta/api.py"
PUBLIC = ("batch", "config", "errors", "hookspecs", "metrics", "parts", "registry", "schema")
PACKAGES = ("ledger", "services", "testing", "wire")


def modules():
    """What plugins may import."""
    names = [f"asyncflow_core.{name}" for name in PUBLIC]
    for package in PACKAGES:
        top = importlib.import_module(f"asyncflow_core.{package}")
        inside = [m.name for m in pkgutil.iter_modules(top.__path__, f"{top.__name__}.")]
        # A package that exports names itself speaks for its modules.
        names += [top.__name__] if getattr(top, "__all__", None) else inside
    return sorted(name for name in names if not name.rpartition(".")[2].startswith("_"))


def lines():
    """The snapshot's lines, without its head."""
    top = importlib.import_module("asyncflow_core")
    found = []
    for name in top.__all__:
        thing = getattr(top, name)
        home = getattr(thing, "__module__", "")  # pluggy's own for `hookimpl`
        elsewhere = home in modules() or not home.startswith("asyncflow_core")
        found += (
            [f"asyncflow_core.{name}"] if elsewhere else _describe(f"asyncflow_core.{name}", thing)
        )
    for name in modules():
        module = importlib.import_module(name)
        for exported in module.__all__:
            found += _describe(f"{name}.{exported}", getattr(module, exported))
    return found


def text():
    """The snapshot."""
    return "\n".join([f"# Public signatures. Update: {UPDATE}", *lines(), ""])


def _describe(name, thing):
    if inspect.isclass(thing):
        bases = ", ".join(b.__name__ for b in thing.__bases__ if b is not object)
        return [f"class {name}({bases})", *_members(name, thing)]
    foreign = not getattr(thing, "__module__", "").startswith("asyncflow_core")
    if callable(thing) and not foreign:
        return [f"{name}{_signature(thing)}"]
    return [f"{name}: {type(thing).__name__}"]


def _members(name, cls):
    if issubclass(cls, enum.Enum):
        return [f"  {name}.{member.name} = {member.value!r}" for member in cls]
    return [*_fields(name, cls), *_methods(name, cls)]


def _fields(name, cls):
    if dataclasses.is_dataclass(cls):
        none = dataclasses.MISSING
        return [
            f"  {name}.{field.name}: {field.type}"
            + ("" if field.default is none and field.default_factory is none else " = ...")
            for field in dataclasses.fields(cls)
            if not field.name.startswith("_")
        ]
    if issubclass(cls, BaseModel):
        return [
            f"  {name}.{key}{'' if field.is_required() else ' = ...'}"
            for key, field in cls.model_fields.items()
        ]
    return [f"  {name}{_signature(cls.__init__)}"] if "__init__" in vars(cls) else []


def _methods(name, cls):
    found = []
    for key, member in sorted(vars(cls).items()):
        member = getattr(member, "__func__", member)
        if key.startswith("_") or key == "model_config":
            continue
        if isinstance(member, property):
            found.append(f"  {name}.{key}: property")
        elif inspect.isfunction(member):
            kind = "async " if inspect.iscoroutinefunction(member) else ""
            abstract = " [abstract]" if getattr(member, "__isabstractmethod__", False) else ""
            found.append(f"  {kind}{name}.{key}{_signature(member)}{abstract}")
    return found


def _signature(function):
    try:
        found = str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(...)"
    return re.sub(r"<[\w.]*( at 0x[0-9a-f]+|[^<>]*)>", "...", found)


if __name__ == "__main__":
    SNAPSHOT.write_text(text(), encoding="utf-8")
