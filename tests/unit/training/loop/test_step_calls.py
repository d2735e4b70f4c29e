"""What a step of one device does in Python: counted, not timed, so that no loop over parameters creeps back."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import parallelrun
import parallelrun.strategies
from parallelrun.models.layers import RowLinear
from parallelrun.planner.resolve.resolve_config import resolve
from parallelrun.training.loop.build import build
from parallelrun.training.loop.data_runtime import DataRuntime
from parallelrun.training.loop.gradients import Gradients
from parallelrun.training.loop.schedules import LossScaler
from parallelrun.training.loop.step import train_step
from tests.plans import tiny_config

FEW, MANY = 2, 6  # layers
PARAMETERS_OF_A_LAYER = 16
PACKAGE = Path(parallelrun.__file__).parent
OURS = (str(PACKAGE), str(Path(parallelrun.strategies.__file__).parent))
KERNELS = f"{PACKAGE}/distributed/torch_private/products.py"  # called by torch, in place of its own kernels
# Everything around forward and backward: gradients, norm, clipping, update, totals.
OURS_AROUND = ("training/", "models/optimizers/", "distributed/torch_private/")
AROUND = tuple(f"{PACKAGE}/{path}" for path in OURS_AROUND)  # torch's optimizer has loops of its own
# A parameter's gradient is looked at (`is_contiguous`), measured (`numel`) and put in a list (`append`), or measured in
# rows; everything else is done by one call for all of them.
CALLS_PER_PARAMETER = 3.0
FUNCTIONS_PER_LAYER = 34  # modules and the functions of role layers; fewer from Python 3.12 on


READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy")


class HostReads(TorchFunctionMode):
    """Counts the tensors whose values Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in READS:
            self.read[name] += 1
        return function(*args, **(kwargs or {}))


def count_calls(step: Callable[[], object], files: tuple[str, ...] = OURS) -> Counter[str]:
    """Count, by file and function, the Python functions of `files` that a step calls, and the C functions they call.

    Kernels of products are left out: they belong to the operators."""
    calls: Counter[str] = Counter()

    def observe(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event in ("call", "c_call") and file.startswith(files) and file != KERNELS:
            called = "" if event == "call" else f" calls {getattr(argument, '__name__', argument)}"
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}{called}"] += 1

    sys.setprofile(observe)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def counted(num_layers: int, files: tuple[str, ...]) -> Counter[str]:
    """Return the calls of the third step, when the optimizer has its state."""
    overrides = {"model.layers": num_layers, "model.hidden": 16, "optimizer.clip": 1e-3}
    config = tiny_config(overrides)
    training = build(config, resolve(config), torch.device("cpu"))
    scaler = LossScaler(config.precision, scaled=False)
    for number in (1, 2):
        train_step(training, number, 1e-3, scaler)
    found = count_calls(lambda: train_step(training, 3, 1e-3, scaler), files)
    training.close()
    return found


def calls_per_parameter() -> float:
    """Return how many Python and C functions are called around forward and backward for each parameter more."""
    few, many = counted(FEW, AROUND), counted(MANY, AROUND)
    assert few.total() > 50, "nothing was counted"
    return (many - few).total() / ((MANY - FEW) * PARAMETERS_OF_A_LAYER)


def functions_per_layer() -> float:
    few, many = counted(FEW, OURS), counted(MANY, OURS)
    new = {name: count for name, count in (many - few).items() if " calls " not in name}
    return sum(new.values()) / (MANY - FEW)


def test_a_layer_has_as_many_parameters_as_this_test_assumes():
    config = tiny_config({"model.layers": FEW})
    more = tiny_config({"model.layers": MANY})
    found = len(resolve(more).spec.parameters) - len(resolve(config).spec.parameters)
    assert found == (MANY - FEW) * PARAMETERS_OF_A_LAYER


def test_functions_are_called_for_all_parameters_together():
    assert calls_per_parameter() <= CALLS_PER_PARAMETER
    assert functions_per_layer() <= FUNCTIONS_PER_LAYER


def clip_one_by_one(self: Gradients, norm: float, max_norm: float, scale: float = 1.0) -> float:
    for parameter in self._parameters:
        parameter.tensor.grad.mul_(max_norm / norm / scale)
    return max_norm / norm


def zero_one_by_one(self: DataRuntime) -> None:
    for parameter in self.parameters:
        if parameter.tensor.grad is not None:
            parameter.tensor.grad.zero_()


def through_one_more(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*inputs: Any) -> torch.Tensor:
        return forward(*inputs)

    call.__code__ = call.__code__.replace(co_filename=f"{PACKAGE}/models/planted.py")
    return call


for planted in (clip_one_by_one, zero_one_by_one):  # as if they were the project's
    planted.__code__ = planted.__code__.replace(co_filename=f"{PACKAGE}/training/planted.py")


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        (Gradients, "clip", clip_one_by_one),
        (DataRuntime, "begin_step", zero_one_by_one),
    ],
)
def test_a_loop_over_parameters_is_noticed(monkeypatch, owner, name, planted):
    monkeypatch.setattr(owner, name, planted)
    assert calls_per_parameter() > CALLS_PER_PARAMETER


def test_a_function_more_in_each_layer_is_noticed(monkeypatch):
    forward: Callable[..., torch.Tensor] = RowLinear.forward
    monkeypatch.setattr(RowLinear, "forward", through_one_more(forward))
    assert functions_per_layer() > FUNCTIONS_PER_LAYER


def test_a_step_reads_one_tensor():
    """Loss, stop requests and norm are read together: on CUDA each read waits for the device."""
    config = tiny_config()
    training = build(config, resolve(config), torch.device("cpu"))
    scaler = LossScaler(config.precision, scaled=False)
    train_step(training, 1, 1e-3, scaler)
    with HostReads() as reads:
        train_step(training, 2, 1e-3, scaler)
    training.close()
    assert dict(reads.read) == {"tolist": 1}
