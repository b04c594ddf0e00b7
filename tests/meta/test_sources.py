"""What holds for every file of the tree."""

import ast
import re

import pytest

from .conftest import ROOT, product_files, shown, text_files

SOFT, HARD = 500, 800
KITS = "asyncflow_core/testing/"
BANNED = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


@pytest.fixture(scope="module")
def trees():
    """Product files, parsed."""
    return {shown(file): ast.parse(file.read_text(encoding="utf-8")) for file in product_files()}


def test_texts_all_are_ascii():
    found = [shown(file) for file in text_files() if not file.read_bytes().isascii()]
    assert not found


def test_texts_none_names_the_machine_they_were_written_on():
    place = re.compile(r"(?<![\w.$}])/(?:work|root)\b(?!\w)")
    found = [
        f"{shown(file)}: {match.group()}"
        for file in text_files()
        for match in place.finditer(file.read_text(encoding="utf-8"))
        if file.parent != ROOT / "tests" / "meta"
    ]
    assert not found


def test_modules_none_is_too_long():
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in product_files()}
    over = {shown(file): n for file, n in lengths.items() if n > SOFT}
    assert not {name: n for name, n in over.items() if not name.startswith(KITS) or n > HARD}


def test_tests_none_is_too_long():
    found = {
        shown(file): n
        for file in text_files()
        if file.suffix == ".py" and (n := len(file.read_text().splitlines())) > HARD
    }
    assert not found


def test_product_never_pickles_or_evaluates(trees):
    found = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            else:
                modules = []
            found += [f"{name}: import {m}" for m in modules if m.split(".")[0] in BANNED]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in ("eval", "exec", "compile", "__import__"):
                    found.append(f"{name}:{node.lineno}: {node.func.id}")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                found += [f"{name}:{node.lineno}: {fault}" for fault in _unsafe(node)]
    assert not found


def _unsafe(call):
    """Calls that unpickle behind another name."""
    name = ast.unparse(call.func)
    options = {k.arg: k.value for k in call.keywords}
    if name in ("torch.load", "torch.save"):
        yield f"{name} pickles"
    if name in ("np.load", "numpy.load", "np.save", "np.savez"):
        allowed = options.get("allow_pickle")
        if allowed is None and name.endswith("load"):
            return  # numpy's own default refuses
        if allowed is not None and not (isinstance(allowed, ast.Constant) and not allowed.value):
            yield f"{name} may pickle"
    if name.startswith(("dist.", "torch.distributed.")) and name.endswith("_object_list"):
        yield f"{name} pickles"


def test_modules_each_says_what_it_is_for(trees):
    assert not [name for name, tree in trees.items() if not ast.get_docstring(tree)]


def test_core_modules_export_exactly_what_is_public(trees):
    faults = []
    for name, tree in trees.items():
        parts = name.removesuffix(".py").split("/")
        private = any(part.startswith("_") and part != "__init__" for part in parts)
        if parts[0] != "asyncflow_core" or private or name.startswith(KITS):
            continue  # a kit's helpers are its own
        defined, exported = _names(tree)
        if exported is None:
            faults += [f"{name}: no __all__"] if defined else []
            continue
        missing = defined - set(exported)
        if missing:
            faults.append(f"{name}: {sorted(missing)} are public and not in __all__")
        if exported != sorted(exported, key=_rank):
            faults.append(f"{name}: __all__ is not sorted")
    assert not faults


def _names(tree):
    """Functions, classes and constants a module defines in public, and its `__all__`."""
    defined, exported = set(), None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            # A click command is no function any more.
            if not any(ast.unparse(d).startswith(("click.", "cli.")) for d in node.decorator_list):
                defined.add(node.name)
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and target.id == "__all__":
                exported = ast.literal_eval(node.value)
            elif isinstance(target, ast.Name) and target.id.isupper() and len(target.id) > 1:
                defined.add(target.id)
    return {name for name in defined if not name.startswith("_")}, exported


def _rank(name):
    """Constants, then classes, then the rest, as ruff sorts them."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return kind, [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)]
