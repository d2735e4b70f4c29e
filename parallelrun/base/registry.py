"""Import paths of strategies, models, datasets and trackers by name. No other module of the runner knows these names.

Plug-ins add their own through the entry-point groups `parallelrun.strategies`, `parallelrun.models`,
`parallelrun.datasets` and `parallelrun.trackers` (name: `axis.kind` for strategies, else the name; value: the
package or module)."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType

STRATEGIES = {
    "data.naive_ddp": "parallelrun.strategies.data.naive_ddp",
    "data.ddp": "parallelrun.strategies.data.ddp",
    "data.zero1": "parallelrun.strategies.data.zero1",
    "data.zero2": "parallelrun.strategies.data.zero2",
    "data.fsdp": "parallelrun.strategies.data.fsdp",
    "data.ring": "parallelrun.strategies.data.ring",
    "data.horovod": "parallelrun.strategies.data.horovod",
    "data.ps": "parallelrun.strategies.data.ps",
    "data.local_sgd": "parallelrun.strategies.data.local_sgd",
    "data.diloco": "parallelrun.strategies.data.diloco",
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
    "pipeline.dualpipev": "parallelrun.strategies.pipeline",
    "expert.capacity": "parallelrun.strategies.expert.capacity",
    "expert.dropless": "parallelrun.strategies.expert.dropless",
    "context.ring": "parallelrun.strategies.context",
    "context.allgather": "parallelrun.strategies.context",
    "context.ulysses": "parallelrun.strategies.context",
    "context.usp": "parallelrun.strategies.context",
}
# the torch-free modules with the config classes of the axes' built-in strategies, each named by its `kind`; the
# strategies of the other axes read the keys of the schema's own section
STRATEGY_KEYS = {
    "data": "parallelrun.strategies.data.common.keys",
    "tensor": "parallelrun.strategies.tensor.common.keys",
    "context": "parallelrun.strategies.context.keys",
}
# the modules of built-in data strategies that have none of their own: buckets, and the rule of compressed sums
DATA_DEFAULTS = {
    "runtime": "parallelrun.strategies.data.common.reducer",
    "reference": "parallelrun.strategies.data.common.compression.reference",
}
# the modules that send compressed gradients, by `strategy.data.compression`
_SENDERS = {"fp16": "half_precision", "bf16": "half_precision", "powersgd": "powersgd"}
COMPRESSIONS = {name: f"parallelrun.strategies.data.common.compression.{file}" for name, file in _SENDERS.items()}
IMAGE_MODELS = ("resnet", "alexnet", "vgg")
MODELS = ("gpt", "bert", "mlp", "matmul", *IMAGE_MODELS, "module", "hf")
DATASETS = ("pystdlib", "text", "chat", "labelled", "megatron", "mixture", "synthetic", "custom")
IMAGE_DATASETS = ("digits", "mnist", "cifar10", "imagefolder")
TRACKERS = ("tensorboard", "wandb", "mlflow")
BUILT_IN = {
    "strategies": STRATEGIES,
    "compressions": COMPRESSIONS,
    "models": {name: f"parallelrun.models.{name}" for name in MODELS},
    "datasets": {
        **{name: f"parallelrun.data.{name}" for name in DATASETS},
        **{name: f"parallelrun.data.images.{name}" for name in IMAGE_DATASETS},
    },
    "trackers": {name: f"parallelrun.report.trackers.{name}" for name in TRACKERS},
}


class PlugInFailed(ImportError):
    """The module of a plug-in raised the exception that is the cause of this one."""


def names(kind: str) -> dict[str, str]:
    """Every known name of `kind` (a key of `BUILT_IN`) with its import path, plug-ins included."""
    return {**_plug_ins(kind), **BUILT_IN[kind]}


def has(kind: str, name: str) -> bool:
    """Whether `name` is known. Built-in names need no package metadata."""
    return name in BUILT_IN[kind] or name in _plug_ins(kind)


@lru_cache(maxsize=len(BUILT_IN))
def _plug_ins(kind: str) -> dict[str, str]:
    """The plug-ins of `kind`. importlib.metadata, which is slow to import, is used only if there may be plug-ins."""
    if not _may_have_plug_ins():
        return {}
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=f"parallelrun.{kind}")}


def _may_have_plug_ins() -> bool:
    """Whether a package in a folder of the path has entry points in a group of ours, or may be found elsewhere."""
    if any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder):
        return True
    for folder in dict.fromkeys(path or "." for path in sys.path):
        if os.path.isfile(folder) or folder.endswith(".egg"):
            return True
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            if name.endswith((".dist-info", ".egg-info")):
                with suppress(OSError), open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                    if b"[parallelrun." in file.read():
                        return True
    return False


def load(kind: str, name: str, submodule: str = "") -> ModuleType:
    """Import the module of `name`, or its submodule (`plan`, `runtime`, `spec`, `network`). Raises KeyError, and
    PlugInFailed where a plug-in cannot be imported."""
    target = path(kind, name, submodule)
    try:
        return import_module(target)
    except Exception as error:
        if not is_plug_in(kind, name):
            raise
        raise PlugInFailed(f"the plug-in {name} of parallelrun.{kind} ({target}) cannot be imported") from error


def path(kind: str, name: str, submodule: str = "") -> str:
    """The import path of the module of `name`, or of its submodule. Raises KeyError."""
    if submodule == "network" and kind == "models" and name in IMAGE_MODELS:
        return "parallelrun.models.vision.network"  # their specs say all that differs
    if submodule == "network" and kind == "models" and name == "hf":
        return "parallelrun.models.module.network"
    package = BUILT_IN[kind].get(name) or _plug_ins(kind)[name]
    if not submodule:
        return package
    has_default = name.startswith("data.") and submodule in DATA_DEFAULTS and not is_plug_in(kind, name)
    if has_default and not has_submodule(kind, name, submodule):
        return DATA_DEFAULTS[submodule]
    return f"{package}.{submodule}"


def has_submodule(kind: str, name: str, submodule: str) -> bool:
    """Whether the package of a built-in `name` has this submodule, which is not imported."""
    return find_spec(f"{BUILT_IN[kind][name]}.{submodule}") is not None


def is_plug_in(kind: str, name: str) -> bool:
    """Whether `name` comes from an entry point."""
    return name not in BUILT_IN[kind]
