import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rollout_helpers import tiny_qwen3


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_qwen3().save_pretrained(path)
    return path
