"""torchvision's own networks. PyPI's torchvision is built for CUDA: beside a CPU torch its operators do not load, and
without one of them it cannot be imported. The networks need none."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def _models() -> Any:
    try:
        return import_module("torchvision.models")
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            _OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return import_module("torchvision.models")


_MODELS = _models()
resnet18, mobilenet_v3_small, VisionTransformer = (
    _MODELS.resnet18,
    _MODELS.mobilenet_v3_small,
    _MODELS.VisionTransformer,
)
