"""Names to import paths, lazily: the only place where the runner knows a strategy, a model or a dataset by name.

Third parties add their own through the entry-point groups `parallelrun.strategies`, `parallelrun.models` and
`parallelrun.datasets` (name = `axis.kind` for strategies, else the name; value = the package or module).
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from types import ModuleType

STRATEGIES = {
    "data.ddp": "parallelrun.strategies.data.ddp",
    "data.ring": "parallelrun.strategies.data.ring",
    "data.horovod": "parallelrun.strategies.data.horovod",
    "data.zero1": "parallelrun.strategies.data.zero1",
    "data.ps": "parallelrun.strategies.data.ps",
    "data.zero2": "parallelrun.strategies.data.zero2",
    "data.local_sgd": "parallelrun.strategies.data.local_sgd",
    "data.diloco": "parallelrun.strategies.data.diloco",
    "data.fsdp": "parallelrun.strategies.data.fsdp",
    "tensor.megatron": "parallelrun.strategies.tensor.megatron",
    "tensor.2d": "parallelrun.strategies.tensor.grid",
    "tensor.2.5d": "parallelrun.strategies.tensor.grid",
    "tensor.3d": "parallelrun.strategies.tensor.grid",
    "pipeline.none": "parallelrun.strategies.pipeline",
    "pipeline.naive": "parallelrun.strategies.pipeline",
    "pipeline.gpipe": "parallelrun.strategies.pipeline",
    "pipeline.1f1b": "parallelrun.strategies.pipeline",
    "pipeline.interleaved": "parallelrun.strategies.pipeline",
    "pipeline.zero_bubble": "parallelrun.strategies.pipeline",
    "pipeline.zbv": "parallelrun.strategies.pipeline",
    "expert.capacity": "parallelrun.strategies.expert.capacity",
    "expert.dropless": "parallelrun.strategies.expert.dropless",
}
MODELS = {
    "gpt": "parallelrun.models.gpt",
    "bert": "parallelrun.models.bert",
    "mlp": "parallelrun.models.mlp",
    "matmul": "parallelrun.models.matmul",
    "resnet": "parallelrun.models.resnet",
    "alexnet": "parallelrun.models.alexnet",
    "vgg": "parallelrun.models.vgg",
    "module": "parallelrun.models.module",
}
DATASETS = {
    "pystdlib": "parallelrun.data.pystdlib",
    "text": "parallelrun.data.text",
    "megatron": "parallelrun.data.megatron",
    "synthetic": "parallelrun.data.synthetic",
    "digits": "parallelrun.data.digits",
    "mnist": "parallelrun.data.mnist",
    "cifar10": "parallelrun.data.cifar10",
    "imagefolder": "parallelrun.data.imagefolder",
}
_BUILT_IN = {"strategies": STRATEGIES, "models": MODELS, "datasets": DATASETS}


def names(kind: str) -> dict[str, str]:
    """Every known name of `kind` (strategies | models | datasets) with its import path, plug-ins included."""
    return {**_plug_ins(kind), **_BUILT_IN[kind]}


def has(kind: str, name: str) -> bool:
    """Whether `name` is known; for a built-in name no package's metadata is read."""
    return name in _BUILT_IN[kind] or name in _plug_ins(kind)


@lru_cache(maxsize=3)
def _plug_ins(kind: str) -> dict[str, str]:
    """Reading the metadata of every installed package takes tens of milliseconds: once per process, where needed."""
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=f"parallelrun.{kind}")}


def load(kind: str, name: str, half: str = "") -> ModuleType:
    """Import the module of `name`, or its submodule `half` (`plan`, `runtime`, `spec`, `network`). Raises KeyError."""
    path = _BUILT_IN[kind].get(name) or _plug_ins(kind)[name]
    return import_module(f"{path}.{half}" if half else path)
