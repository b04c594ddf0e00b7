"""Lets torchvision from PyPI be imported beside a CPU build of torch.

Its compiled operators need CUDA and stay unloaded, but its Python registers shape functions for two
of them and fails if nobody declared them. They are declared right before torchvision is imported;
only image inputs would call them. A `.pth` file imports this module when the interpreter starts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_kept: list[Any] = []


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and not _kept:
            import torch

            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(library)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
