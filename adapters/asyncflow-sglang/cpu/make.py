"""Makes a virtual environment in which SGLang serves on a CPU; does nothing if it is there.

    python adapters/asyncflow-sglang/cpu/make.py .venv-sglang

SGLang's own pins are gigabytes of CUDA, so it is installed without them, with what its server
imports (requirements.txt) and stand-ins for two things that only a GPU needs (stand_ins/). A change
of these files makes the environment anew.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
STAMP = "made-of"


def fingerprint() -> str:
    """Of everything the environment is made of."""
    digest = hashlib.sha256(sys.version.encode())
    for file in sorted(HERE.rglob("*")):
        if file.suffix in (".py", ".txt"):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def make(target: Path) -> None:
    """Make it, or leave nothing that passes for it."""
    start = time.perf_counter()
    print(f"making {target}: SGLang for CPUs, PyTorch included; this takes minutes ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(target)], check=True)
    (target / ".gitignore").write_text("*\n", encoding="utf-8")
    python = target / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", str(HERE / "requirements.txt")], check=True)
    subprocess.run([*pip, "--no-deps", "-r", str(HERE / "requirements-no-deps.txt")], check=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([str(python), "-c", where], check=True, capture_output=True, text=True)
    site = Path(found.stdout.strip())
    shutil.copytree(HERE / "stand_ins", site, dirs_exist_ok=True)
    (site / "asyncflow_cpu_stand_ins.pth").write_text("import asyncflow_cpu_stand_ins\n", "utf-8")
    (target / STAMP).write_text(fingerprint(), encoding="utf-8")
    print(f"made {target} in {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    """Make the environment named on the command line unless it is there and up to date."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    target = Path(sys.argv[1])
    stamp = target / STAMP
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != fingerprint():
        make(target)


if __name__ == "__main__":
    main()
