"""Tiny image classifiers for tests: every kind of operation, a few thousand parameters, synthetic images."""

from __future__ import annotations

from typing import Any

IMAGES: dict[str, Any] = {
    "model.vocab": None, "dataset.name": "synthetic", "dataset.samples": 64, "dataset.vocab": 5, "global_batch": 16,
    "model.channels": 2,
}  # fmt: skip
RESNET: dict[str, Any] = {
    **IMAGES, "model.name": "resnet", "model.preset": "resnet", "model.image": 8, "model.width": 4,
    "model.stages": (1, 1),
}  # fmt: skip
BOTTLENECK: dict[str, Any] = {**RESNET, "model.bottleneck": True, "model.stem": "large", "model.image": 16}
ALEXNET: dict[str, Any] = {
    **IMAGES, "model.name": "alexnet", "model.preset": "alexnet", "model.image": 64, "model.width": 2, "model.ffn": 8,
}  # fmt: skip
VGG: dict[str, Any] = {
    **IMAGES, "model.name": "vgg", "model.preset": "vgg16", "model.image": 8, "model.width": 2, "model.ffn": 8,
    "model.stages": (1, 2),
}  # fmt: skip
