"""What tensor axes may do with an image classifier. Torch-free."""

from __future__ import annotations

from parallelrun.config.schema import Config
from parallelrun.errors import Problem
from parallelrun.model_spec import ModelSpec
from parallelrun.plan.load import tensor_strategy
from parallelrun.registry import has


def check(spec: ModelSpec, config: Config, tp: int) -> list[Problem]:
    """Layout 1d splits large linear layers (AlexNet's, VGG's: most of their weights), convolutions stay whole on every
    rank. A network without such layers has nothing to split, and no other layout knows images."""
    if spec.kind != "images" or tp == 1:
        return []
    fix = f"tp=1 dp={tp} or tp=1 pp={tp}"
    if not any(layer.layer_role == "column_parallel" for layer in spec.layers()):
        what = f"model={spec.name}: convolutions are not split by channels, so tp={tp} has nothing to split"
        return [Problem(what, "tp", fix, kind="not_built")]
    kind = config.strategy.tensor.kind
    if not (has("strategies", f"tensor.{kind}") and tensor_strategy(kind).splits_images):
        what = f"model={spec.name}: layout={kind} does not split images, only layout=1d is built"
        return [Problem(what, "layout", "layout=1d or strategy=tp", kind="not_built")]
    return []
