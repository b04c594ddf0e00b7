"""`asyncflow new-plugin KIND NAME`: a pip package that offers one plugin, working and tested.

Its texts are the templates beside this module: a folder for each kind, and `package` for what all
have. `$name` and the like are replaced; a template is otherwise the file that is written.
"""

from __future__ import annotations

import keyword
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, metadata
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from asyncflow_core import __version__
from asyncflow_core.config_source import dump_yaml
from asyncflow_core.errors import ConfigError
from asyncflow_core.registry import KINDS, Registry

__all__ = ["new_plugin", "package_files"]

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_LONGEST = 30  # a line of the templates with a longer one would be over 100 characters
_USAGE: Mapping[str, object] = {
    "stage": {"stages": {"advantage": {"plugin": "NAME"}}},
    "lease_policy": {
        "data_store": {"plugin": "memory", "options": {"lease_policies": ["NAME"]}},
        "rollout": {"lease_policy": "NAME"},
    },
}


def new_plugin(kind: str, name: str, out: str | None) -> None:
    """Write the package and say what comes next.

    Raises:
        ConfigError: with everything that is wrong with kind, name and folder; nothing is written.
    """
    target = Path(out if out is not None else _distribution(kind, name))
    try:
        faults = [*_kind_and_name_faults(kind, name), *_target_faults(target)]
        if faults:
            raise ConfigError(faults)
        written = package_files(kind, name)
        _write(target, written)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error
    print(f"wrote {target}:")
    for path in sorted(written):
        print(f"  {path}")
    print("next:")
    print(f"  cd {target}")
    for command in ("pip install -e '.[test]'", "pytest", f"asyncflow check-plugin {kind}.{name}"):
        print(f"  {command}")


def package_files(kind: str, name: str) -> dict[str, str]:
    """The files of a package by their path in it."""
    package = f"asyncflow_{kind}_{name}"
    values = {
        "core": _compatible(__version__),
        "distribution": _distribution(kind, name),
        "kind": kind,
        "label": f"{kind}.{name}",
        "name": name,
        "package": package,
        "usage": _usage(kind, name),
    }
    places = {
        "pyproject.toml": "package/pyproject.toml",
        "README.md": "package/README.md",
        f"src/{package}/__init__.py": "package/__init__.py",
        f"src/{package}/plugin.py": f"{kind}/plugin.py",
        f"src/{package}/{kind}.py": f"{kind}/module.py",
        f"tests/test_{kind}_{name}.py": f"{kind}/test.py",
    }
    templates = files("asyncflow_core.cli") / "templates"
    texts = {
        path: Template((templates / f"{template}.txt").read_text(encoding="utf-8"))
        for path, template in places.items()
    }
    return {
        **{path: text.substitute(values) for path, text in texts.items()},
        f"src/{package}/py.typed": "",
    }


def _distribution(kind: str, name: str) -> str:
    return f"asyncflow-{kind}-{name}".replace("_", "-")


def _compatible(version: str) -> str:
    """The versions of core that the contract will not change in."""
    major, minor = version.split(".")[:2]
    return f">={major}.{minor},<{major}.{int(minor) + 1}"


def _usage(kind: str, name: str) -> str:
    """Lines of a configuration."""
    usage = _USAGE.get(kind, {kind: {"plugin": "NAME"}})
    assert isinstance(usage, dict)
    return dump_yaml(usage).replace("NAME", name).rstrip()


def _kind_and_name_faults(kind: str, name: str) -> Iterator[str]:
    if kind not in KINDS:
        yield f"no plugin kind {kind!r}; kinds are {', '.join(KINDS)}"
        return
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        near = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:_LONGEST].strip("_")
        hint = f", as {near!r}" if _NAME.fullmatch(near) else ""
        yield (
            f"a plugin cannot be called {name!r}; a name is a lower-case letter, then up to "
            f"{_LONGEST - 1} lower-case letters, digits and single underscores{hint}"
        )
        return
    if keyword.iskeyword(name):
        yield f"a plugin cannot be called {name!r}, which is a word of Python; choose another name"
    for entry in Registry().entries():
        if (entry.kind, entry.name) == (kind, name):
            yield (
                f"{entry.label} is offered by {entry.distribution} {entry.version} already, and a "
                f"name is offered once; choose another name"
            )
            return
    yield from _package_faults(kind, name)


def _package_faults(kind: str, name: str) -> Iterator[str]:
    distribution, package = _distribution(kind, name), f"asyncflow_{kind}_{name}"
    try:
        found = metadata(distribution)["Version"]
    except PackageNotFoundError:
        pass
    else:
        yield f"the distribution {distribution} {found} is installed already; choose another name"
        return
    if find_spec(package) is not None:
        yield f"there is a module {package} already; choose another name"


def _target_faults(target: Path) -> Iterator[str]:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        yield f"{target} is there already and no folder; give another by --out"
    elif target.is_dir() and any(target.iterdir()):
        yield (
            f"{target} is there already and not empty, and nothing is overwritten; give another "
            f"by --out"
        )


def _write(target: Path, written: Mapping[str, str]) -> None:
    """All of it is written beside the folder first: a full disk leaves nothing in it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        for path, text in written.items():
            file = part / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        target.mkdir(exist_ok=True)
        for entry in part.iterdir():
            entry.rename(target / entry.name)
    finally:
        shutil.rmtree(part)
