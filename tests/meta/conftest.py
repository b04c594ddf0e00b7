"""What is ours: sources and texts of every distribution in the tree."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("asyncflow_core", "plugins/*/src", "adapters/*/src")
TEXTS = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".jsonl", ".json", ".cfg", ""}
_OUTSIDE = {
    *(".git", ".venv", ".ruff_cache", ".pytest_cache", ".mypy_cache", ".hypothesis"),
    *(".venv-sglang", "__pycache__", "build", "dist", "site", "runs", "shared", "node_modules"),
}


def product_files():
    """Every Python file that is shipped."""
    return sorted(
        file for pattern in PRODUCT for top in ROOT.glob(pattern) for file in top.rglob("*.py")
    )


def text_files():
    """Every text file of the tree that is not made by a tool."""
    found = []
    for folder, folders, names in ROOT.walk() if hasattr(ROOT, "walk") else _walk(ROOT):
        folders[:] = [f for f in folders if f not in _OUTSIDE and not f.endswith(".egg-info")]
        found += [folder / name for name in names if (folder / name).suffix in TEXTS]
    return sorted(found)


def _walk(top):
    import os

    return ((Path(folder), folders, names) for folder, folders, names in os.walk(top))


def shown(file):
    """As a message names it."""
    return file.relative_to(ROOT).as_posix()
